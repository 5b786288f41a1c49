"""What operators with windows that slide over images share: arguments, sizes, derivatives.

Such an operator is f(input, weight, [bias,] stride, padding, dilation), linear in input and weight
each; its backward takes a mask of the gradients that are wanted, and returns empty ones for others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.core import library

Size = int | tuple[int, int]
Tangents = tuple[Tensor | None, ...]

_MOST = 2**31  # as the kernels: beyond it sums of sizes could overflow


def pair(op: str, name: str, value: Size | list[int], least: int) -> tuple[int, int]:
    """Returns `value` as (vertical, horizontal).

    Raises:
        TypeError: not an int or a pair of ints.
        RuntimeError: less than `least`, or more than 2³¹.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    sides: Any = value if is_pair else (value, value)
    first, second = sides
    if not (library.is_int(first) and library.is_int(second)):
        raise TypeError(f"{op}: {name} must be an int or a pair of ints, got {value!r}")
    if min(first, second) < least:
        raise RuntimeError(f"{op}: {name} must be at least {least}, got {value!r}")
    if max(first, second) > _MOST:
        raise RuntimeError(f"{op}: {name} must be at most {_MOST}, got {value!r}")
    return first, second


def check_image(op: str, input: Tensor) -> None:
    """Checks for fakes that `input` is [N, C, H, W].

    Raises:
        RuntimeError: it is not.
    """
    torch._check(
        input.dim() == 4,
        lambda: f"{op}: input must have shape [N, C, H, W], got {list(input.shape)}",
    )


def count_places(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Returns the places of a kernel in one dimension, for one that fits."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    last = (room + (stride - 1 if ceil_mode else 0)) // stride
    return last if ceil_mode and last * stride >= size + padding else last + 1


def places(
    op: str,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    ceil_mode: bool = False,
) -> list[int]:
    """Returns the places of a kernel in each dimension: the output's size, for fakes.

    With `ceil_mode` the last may reach over the padded image, but begin before the padding there.

    Raises:
        RuntimeError: the kernel does not fit.
    """
    for name, values, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
    ):
        if len(values) != 2 or min(values) < least:
            raise RuntimeError(
                f"{op}: {name} must be two integers, at least {least}, got {list(values)}"
            )
        if max(values) > _MOST:
            raise RuntimeError(f"{op}: {name} must be at most {_MOST}, got {list(values)}")
    outputs = []
    for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        padded, span = size + 2 * p, d * (k - 1) + 1
        torch._check(
            padded + (s - 1 if ceil_mode else 0) >= span,
            lambda span=span, padded=padded: (  # type: ignore[misc]
                f"{op}: the dilated kernel must fit into the padded input; "
                f"the kernel spans {span}, the padded input {padded}"
            ),
        )
        outputs.append(count_places(size, k, s, p, d, ceil_mode))
    return outputs


def register(
    op: torch._ops.OpOverload,
    op_backward: torch._ops.OpOverload,
    check: Callable[..., Sequence[int]],
    weight_like: Callable[[Tensor], Tensor],
    vmap: Callable[..., Any],
    vmap_backward: Callable[..., Any],
) -> None:
    """Registers what PyTorch must know of such an operator and of its backward.

    Args:
        op: the operator.
        op_backward: its backward.
        check: f(name, input, weight, stride, padding, dilation), checks the arguments of fakes as
            the kernels of either do, and returns the output's height and width.
        weight_like: f(weight), returns an empty gradient of it.
        vmap: the rule of `op`.
        vmap_backward: the rule of `op_backward`.
    """
    count = len(op_backward._schema.returns)  # of tensors: input, weight and perhaps bias

    @library.register_fake(op)
    def _(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        *biases, stride, padding, dilation = rest
        size = check(op._opname, input, weight, stride, padding, dilation)
        for bias in biases:
            if bias is not None:
                library.check_fake(op._opname, "bias", bias, input.shape[1:2], "input", input)
        return library.image_like(input, *size)

    @library.register_fake(op_backward)
    def _(
        grad_output: Tensor, input: Tensor, weight: Tensor, *geometry_and_mask: Any
    ) -> tuple[Tensor, ...]:
        *geometry, mask = geometry_and_mask
        name = op_backward._opname
        shape = (*input.shape[:2], *check(name, input, weight, *geometry))
        library.check_fake(name, "grad_output", grad_output, shape, "input", input)
        image = library.image_like(input, *input.shape[2:])
        grads = (image, weight_like(weight), weight.new_empty(input.shape[1:2]))
        return tuple(
            grad if needed else weight.new_empty([0])
            for grad, needed in zip(grads, mask, strict=False)
        )

    def apply(input: Tensor, weight: Tensor, geometry: Sequence[Any]) -> Tensor:
        out: Tensor = op(input, weight, *[None] * (count - 2), *geometry)
        return out

    def linear(
        input: Tensor, weight: Tensor, geometry: Sequence[Any], tangents: Tangents, like: Tensor
    ) -> Tensor | None:
        """How the output, of the shape of `like`, moves with input, weight and bias."""
        of_input, of_weight, of_bias = (*tangents, None)[:3]
        return library.total(
            None if of_input is None else apply(of_input, weight, geometry),
            None if of_weight is None else apply(input, of_weight, geometry),
            None if of_bias is None else of_bias[:, None, None].expand_as(like),
        )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.geometry = inputs[count:]

    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        mask = ctx.needs_input_grad[:count]
        grads = op_backward(grad_output, *saved, *ctx.geometry, mask)
        return *(g if m else None for g, m in zip(grads, mask, strict=True)), None, None, None

    def jvp(inputs: tuple[Any, ...], outputs: tuple[Tensor], tangents: Tangents) -> Tensor | None:
        return linear(inputs[0], inputs[1], inputs[count:], tangents[:count], outputs[0])

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.geometry, ctx.mask = inputs[3:6], inputs[6]
        ctx.set_materialize_grads(False)

    def double_backward(
        ctx: Any, saved: tuple[Tensor, ...], *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The arguments are gradients with respect to those that the backward has returned."""
        grad_output, input, weight = saved
        tangents = tuple(g if m else None for g, m in zip(grads, ctx.mask, strict=True))
        of_input, of_weight = tangents[:2]
        by_grad_output = by_input = by_weight = None
        if ctx.needs_input_grad[0]:
            by_grad_output = linear(input, weight, ctx.geometry, tangents, grad_output)
        if ctx.needs_input_grad[1] and of_weight is not None:
            mask = [True] + [False] * (count - 1)
            by_input = op_backward(grad_output, input, of_weight, *ctx.geometry, mask)[0]
        if ctx.needs_input_grad[2] and of_input is not None:
            mask = [False, True] + [False] * (count - 2)
            by_weight = op_backward(grad_output, of_input, weight, *ctx.geometry, mask)[1]
        return by_grad_output, by_input, by_weight, None, None, None, None

    def jvp_backward(
        inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], tangents: Tangents
    ) -> Tangents:
        grad_output, input, weight, *geometry, mask = inputs
        of_grad_output, of_input, of_weight = tangents[:3]
        moved = list(map(torch.zeros_like, outputs))

        def add(tensors: Sequence[Tensor], mask: Sequence[bool]) -> None:
            grads = op_backward(*tensors, *geometry, mask)
            for i in range(count):
                if mask[i]:
                    moved[i] = moved[i] + grads[i]

        if of_grad_output is not None:
            add((of_grad_output, input, weight), mask)
        if of_input is not None and mask[1]:
            add((grad_output, of_input, weight), [False, True, False][:count])
        if of_weight is not None and mask[0]:
            add((grad_output, input, of_weight), [True, False, False][:count])
        return tuple(moved)

    library.register_autograd(op, setup, backward, jvp, vmap)
    library.register_autograd(
        op_backward, setup_backward, double_backward, jvp_backward, vmap_backward
    )
