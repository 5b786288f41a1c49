"""Operators with sliding windows: arguments, output sizes, derivatives of bilinear ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.core import check, layout
from ops.core.families import Dims, folded, total
from ops.core.registration import REGION, register
from ops.core.torch_private import OpOverload, name_of, schema_of

Size = int | tuple[int, int]
Tangents = tuple[Tensor | None, ...]

_MOST = 2**31  # kMost of windows.h: beyond it sums of sizes could overflow
_MOST_CHANNELS = 65_535  # of a CUDA grid's second dimension
_LEAST = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def pair(op: str, name: str, value: Size | list[int]) -> tuple[int, int]:
    """Return an argument such as "stride" as (vertical, horizontal).

    Raises:
        TypeError: not an int or a pair of ints.
        RuntimeError: less than 1 (padding: 0), or more than 2³¹.
    """
    least = _LEAST[name]
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    sides: Any = value if is_pair else (value, value)
    first, second = sides
    if not (check.is_int(first) and check.is_int(second)):
        raise TypeError(f"{op}: {name} must be an int or a pair of ints, got {value!r}")
    if min(first, second) < least:
        raise RuntimeError(f"{op}: {name} must be at least {least}, got {value!r}")
    if max(first, second) > _MOST:
        raise RuntimeError(f"{op}: {name} must be at most {_MOST}, got {value!r}")
    return first, second


def pairs(op: str, **arguments: Size) -> list[tuple[int, int]]:
    """Return the arguments, by name, as :func:`pair` does."""
    return [pair(op, name, value) for name, value in arguments.items()]


def plain(*sizes: object) -> bool:
    """Return whether each is an int or a pair of ints, no subclass: C++ takes them unchecked."""
    for size in sizes:
        if type(size) is not int:
            if type(size) is not tuple or len(size) != 2:
                return False
            if not type(size[0]) is type(size[1]) is int:
                return False
    return True


def check_image(op: str, input: Tensor) -> None:
    """Raise RuntimeError unless the fake `input` is [N, C, H, W]."""
    torch._check(
        input.dim() == 4,
        lambda: f"{op}: input must have shape [N, C, H, W], got {list(input.shape)}",
    )


def count_places(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Return the output size of one dimension, for a kernel that fits."""
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
    """Return the output size of each dimension, checked as windows.h checks it.

    With `ceil_mode` the last window may reach over the padded image, but must begin before the
    padding at its end.

    Raises:
        RuntimeError: the kernel does not fit.
    """
    spacing = {"stride": stride, "padding": padding, "dilation": dilation}
    for name, values in spacing.items():
        least = _LEAST[name]
        if len(values) != 2 or min(values) < least:
            raise RuntimeError(
                f"{op}: {name} must be two integers, at least {least}, got {list(values)}"
            )
        if max(values) > _MOST:
            raise RuntimeError(f"{op}: {name} must be at most {_MOST}, got {list(values)}")
    outputs = []
    for side, size, k, s, p, d in zip("HW", sizes, kernel, stride, padding, dilation, strict=True):
        padded, span = size + 2 * p, d * (k - 1) + 1
        torch._check(
            padded + (s - 1 if ceil_mode else 0) >= span,
            lambda side=side, span=span, padded=padded: (  # type: ignore[misc]
                f"{op}: the dilated kernel must fit into the padded input; in {side} "
                f"the kernel spans {span}, the padded input {padded}"
            ),
        )
        outputs.append(count_places(size, k, s, p, d, ceil_mode))
    return outputs


def register_bilinear(
    op: OpOverload,
    op_backward: OpOverload,
    *,
    check_arguments: Callable[..., Sequence[int]],
    weight_like: Callable[[Tensor], Tensor],
    batch_dims: Dims,
    flops: Callable[[Sequence[int], Sequence[int]], int],
) -> None:
    """Register f(input, weight, [bias,] stride, padding, dilation) and its backward operator.

    f is linear in input and weight each. The backward operator takes (grad_output, input, weight,
    stride, padding, dilation, output_mask), and returns [0] for gradients that are not needed.

    Args:
        op: f.
        op_backward: its backward.
        check_arguments: f(name, input, weight, stride, padding, dilation), checks the fakes as the
            kernels of either operator check tensors, and returns the output's height and width.
        weight_like: f(weight), returns an empty gradient of it.
        batch_dims: the dimension of each tensor (input, weight, bias) that vmap folds into.
        flops: f(weight_shape, output_shape), the operations of one pass.
    """
    limit = _MOST_CHANNELS if batch_dims[0] == 1 else None
    count = len(schema_of(op_backward).returns)  # of tensors: input, weight and perhaps bias

    def fake(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        *biases, stride, padding, dilation = rest
        size = check_arguments(name_of(op), input, weight, stride, padding, dilation)
        for bias in biases:
            if bias is not None:
                check.matches(name_of(op), "bias", bias, input.shape[1:2], "input", input)
        return layout.resized(input, *size)

    def fake_backward(
        grad_output: Tensor, input: Tensor, weight: Tensor, *geometry_and_mask: Any
    ) -> tuple[Tensor, ...]:
        *geometry, mask = geometry_and_mask
        name = name_of(op_backward)
        shape = (*input.shape[:2], *check_arguments(name, input, weight, *geometry))
        if len(mask) != count:
            raise RuntimeError(
                f"{name}: output_mask must be {'two' if count == 2 else 'three'} booleans"
            )
        check.matches(name, "grad_output", grad_output, shape, "input", input)
        image = layout.resized(input, *input.shape[2:])
        grads = (image, weight_like(weight), weight.new_empty(input.shape[1:2]))
        return tuple(
            grad if needed else weight.new_empty([0])
            for grad, needed in zip(grads[:count], mask, strict=True)
        )

    def apply(input: Tensor, weight: Tensor, geometry: Sequence[Any]) -> Tensor:
        out: Tensor = op(input, weight, *[None] * (count - 2), *geometry)
        return out

    def push(
        input: Tensor, weight: Tensor, geometry: Sequence[Any], tangents: Tangents, like: Tensor
    ) -> Tensor | None:
        """Return the tangent of the output, of the shape of `like`."""
        of_input, of_weight, of_bias = (*tangents, None)[:3]
        return total(
            None if of_input is None else apply(of_input, weight, geometry),
            None if of_weight is None else apply(input, of_weight, geometry),
            None if of_bias is None else of_bias[:, None, None].expand_as(like),
        )

    def jvp(args: Sequence[Any], outputs: Sequence[Tensor], tangents: Tangents) -> Tensor | None:
        return push(args[0], args[1], args[count:], tangents[:count], outputs[0])

    def double_backward(
        args: Sequence[Any], grads: Tangents, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """`grads` belong to the gradients that the backward operator has returned."""
        grad_output, input, weight, *geometry, mask = args
        tangents = tuple(g if m else None for g, m in zip(grads, mask, strict=True))
        of_input, of_weight = tangents[:2]
        by_grad_output = by_input = by_weight = None
        if needed[0]:
            by_grad_output = push(input, weight, geometry, tangents, grad_output)
        if needed[1] and of_weight is not None:
            only = [True, False, False][:count]
            by_input = op_backward(grad_output, input, of_weight, *geometry, only)[0]
        if needed[2] and of_input is not None:
            only = [False, True, False][:count]
            by_weight = op_backward(grad_output, of_input, weight, *geometry, only)[1]
        return by_grad_output, by_input, by_weight

    def jvp_backward(
        args: Sequence[Any], outputs: Sequence[Tensor], tangents: Tangents
    ) -> tuple[Tensor, ...]:
        grad_output, input, weight, *geometry, mask = args
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

    def count_flops(_: Any, weight: Sequence[int], *rest: Any, out_shape: Any) -> int:
        return flops(weight, out_shape)

    def count_flops_backward(
        grad_output: Sequence[int], _: Any, weight: Sequence[int], *rest: Any, out_shape: Any
    ) -> int:
        return sum(rest[-1][:2]) * flops(weight, grad_output)  # a pass for each of input and weight

    register(
        op,
        fake=fake,
        backward=f"{name_of(op_backward)}"
        "(grad, input, weight, stride, padding, dilation, grad_input_mask)",
        jvp=jvp,
        vmap=folded(op, batch_dims, batch_dims[:1], limit=limit),
        autocast=REGION,
        flops=count_flops,
    )
    register(
        op_backward,
        fake=fake_backward,
        backward=double_backward,
        jvp=jvp_backward,
        vmap=folded(
            op_backward, (batch_dims[0], *batch_dims[:2]), batch_dims, mask=True, limit=limit
        ),
        flops=count_flops_backward,
    )
