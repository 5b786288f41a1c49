"""Sliding-window operators: argument checks, output sizes, derivatives of bilinear operators."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ops.core import check, layout
from ops.core.registration import REGION, register
from ops.core.rules import Dims, folded, total
from ops.core.sharding import Sharding
from ops.core.torch_private import OpOverload, name_of, schema_of

Size = int | tuple[int, int]
Tangents = tuple[Tensor | None, ...]

_MAX_VALUE = 2**31  # kMaxSpacing in windows.h: larger values could overflow sums of sizes
_MIN_VALUE = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def pair(op: str, name: str, value: Size | list[int]) -> tuple[int, int]:
    """Expand an argument such as "stride" to (vertical, horizontal).

    Raises:
        TypeError: not an int or a pair of ints.
        RuntimeError: less than 1 (padding: 0), or more than 2³¹.
    """
    least = _MIN_VALUE[name]
    if type(value) is int and least <= value <= _MAX_VALUE:  # the fast path
        return value, value
    sides: Any = value if isinstance(value, (tuple, list)) else (value,)
    if len(sides) == 1:  # PyTorch takes [2] for 2, too
        sides = (*sides, *sides)
    if len(sides) != 2 or not (check.is_int(sides[0]) and check.is_int(sides[1])):
        raise TypeError(f"{op}: {name} must be an int or a pair of ints, got {value!r}")
    first, second = sides
    if min(first, second) < least:
        raise RuntimeError(f"{op}: {name} must be at least {least}, got {value!r}")
    if max(first, second) > _MAX_VALUE:
        raise RuntimeError(f"{op}: {name} must be at most {_MAX_VALUE}, got {value!r}")
    return first, second


def pairs(layer: str, **arguments: Size) -> list[tuple[int, int]]:
    """Apply :func:`pair` to arguments of a layer; a ValueError, as in torch.nn, if out of range."""
    try:
        return [pair(layer, name, value) for name, value in arguments.items()]
    except RuntimeError as error:
        raise ValueError(*error.args) from None


def check_image(op: str, x: Tensor, name: str = "input") -> None:
    """Raise RuntimeError unless the fake `x` has four dimensions."""
    check.argument(op, name, x.dim() == 4)


def check_pair(op: str, name: str, values: Sequence[int]) -> None:
    """Raise RuntimeError unless the values are two integers in range."""
    least = _MIN_VALUE[name]
    check.argument(op, name, len(values) == 2 and all(least <= v <= _MAX_VALUE for v in values))


def output_length(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Return the output size along one dimension. The kernel must fit into the padded input."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    last = (room + (stride - 1 if ceil_mode else 0)) // stride
    return last if ceil_mode and last * stride >= size + padding else last + 1


def output_size(
    op: str,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    ceil_mode: bool = False,
) -> list[int]:
    """Check the arguments of a fake; return the output height and width.

    With `ceil_mode`, the last window may extend past the padded input. Windows that would start in
    the padding at the end are ignored.

    Raises:
        RuntimeError: an argument is out of range, or the kernel does not fit.
    """
    check_pair(op, "stride", stride)
    check_pair(op, "padding", padding)
    check_pair(op, "dilation", dilation)
    outputs = []
    for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        room = size + 2 * p + (s - 1 if ceil_mode else 0)
        check.argument(op, "kernel: it must fit into the padded input", room >= d * (k - 1) + 1)
        outputs.append(output_length(size, k, s, p, d, ceil_mode))
    return outputs


def select(op: str, mask: Sequence[bool], *grads: Tensor) -> tuple[Tensor, ...]:
    """Return `grads`, those that `mask` excludes as tensors of shape [0]."""
    check.argument(op, "output_mask", len(mask) == len(grads))
    return tuple(
        grad if needed else grad.new_empty([0]) for grad, needed in zip(grads, mask, strict=True)
    )


def register_bilinear(
    op: OpOverload,
    op_backward: OpOverload,
    *,
    check_arguments: Callable[..., Sequence[int]],
    batch_dims: Dims,
    sharding: Sharding,
    sharding_of_backward: Sharding,
    decomposition: Callable[..., Any],
) -> None:
    """Register op(input, weight, [bias,] stride, padding, dilation) and its backward operator.

    `op` is linear in input and linear in weight, whose dimensions 2 and 3 are the taps.
    `op_backward` takes (grad_output, input, weight, stride, padding, dilation, output_mask), and
    returns a tensor of shape [0] for each gradient that the mask excludes.

    Args:
        op: the forward operator.
        op_backward: the backward operator.
        check_arguments: f(name, input, weight, stride, padding, dilation), checks fakes and
            returns the output height and width.
        batch_dims: the dimension of input, weight and bias that vmap folds the batch into.
        sharding: see register.
        sharding_of_backward: the same of the backward operator.
        decomposition: see register.
    """
    count = len(schema_of(op_backward).returns)  # gradients: input, weight and, if any, bias

    def fake(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        *biases, stride, padding, dilation = rest
        size = check_arguments(name_of(op), input, weight, stride, padding, dilation)
        for bias in biases:
            if bias is not None:
                check.same(name_of(op), "bias", bias, input.shape[1:2], input.dtype)
        return layout.resized(input, *size)

    def fake_backward(
        grad_output: Tensor, input: Tensor, weight: Tensor, *geometry_and_mask: Any
    ) -> tuple[Tensor, ...]:
        *geometry, mask = geometry_and_mask
        name = name_of(op_backward)
        shape = (*input.shape[:2], *check_arguments(name, input, weight, *geometry))
        check.same(name, "grad_output", grad_output, shape, input.dtype)
        image = layout.resized(input, *input.shape[2:])
        grads = (image, layout.gradient_of(weight), weight.new_empty(input.shape[1:2]))
        return select(name, mask, *grads[:count])

    def apply(input: Tensor, weight: Tensor, *geometry: Any) -> Tensor:
        out: Tensor = op(input, weight, *[None] * (count - 2), *geometry)
        return out

    def output_tangent(
        input: Tensor, weight: Tensor, geometry: Sequence[Any], tangents: Tangents, like: Tensor
    ) -> Tensor | None:
        """Return the tangent of op's output, of shape `like`; `tangents` are as op's tensors."""
        input_t, weight_t, bias_t = (*tangents, None)[:3]
        return total(
            None if input_t is None else apply(input_t, weight, *geometry),
            None if weight_t is None else apply(input, weight_t, *geometry),
            None if bias_t is None else bias_t[:, None, None].expand_as(like),
        )

    def jvp(args: Sequence[Any], outputs: Sequence[Tensor], tangents: Tangents) -> Tensor | None:
        return output_tangent(args[0], args[1], args[count:], tangents[:count], outputs[0])

    def gradients(tensors: Sequence[Tensor], geometry: Any, mask: Sequence[bool]) -> Any:
        return op_backward(*tensors, *geometry, [bool(m) for m in mask[:count]])

    def backward_of_backward(
        args: Sequence[Any], grads: Tangents, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of grad_output, input and weight.

        `grads` are the gradients of op_backward's outputs; gg_input is the gradient of grad_input.
        """
        grad_output, input, weight, *geometry, mask = args
        gg = tuple(g if m else None for g, m in zip(grads, mask, strict=True))
        gg_input, gg_weight = gg[:2]
        gg_output = grad_input = grad_weight = None
        if needed[0]:
            gg_output = output_tangent(input, weight, geometry, gg, grad_output)
        if needed[1] and gg_weight is not None:
            given = grad_output, input, gg_weight
            grad_input = gradients(given, geometry, [True, False, False])[0]
        if needed[2] and gg_input is not None:
            given = grad_output, gg_input, weight
            grad_weight = gradients(given, geometry, [False, True, False])[1]
        return gg_output, grad_input, grad_weight

    def jvp_of_backward(
        args: Sequence[Any], outputs: Sequence[Tensor], tangents: Tangents
    ) -> tuple[Tensor, ...]:
        tensors, (*geometry, mask) = args[:3], args[3:]
        outputs_t = list(map(torch.zeros_like, outputs))
        # Gradients of input, weight and bias that depend on grad_output, input and weight:
        dependent = ((True, True, True), (False, True, False), (True, False, False))
        for i, tangent in enumerate(tangents[:3]):
            needed = [m and d for m, d in zip(mask, dependent[i], strict=False)]
            if tangent is not None and any(needed):
                given = (*tensors[:i], tangent, *tensors[i + 1 :])
                pairs = zip(outputs_t, gradients(given, geometry, needed), needed, strict=True)
                outputs_t = [y + grad if n else y for y, grad, n in pairs]
        return tuple(outputs_t)

    def flops(_: Any, weight: Sequence[int], *rest: Any, out_shape: Any) -> int:
        """Count a multiplication and an addition for each tap of each output."""
        return 2 * prod(out_shape) * prod(weight[2:4])

    def flops_backward(grad_output: Sequence[int], *args: Any, out_shape: Any) -> int:
        return sum(args[-1][:2]) * flops(*args[:2], out_shape=grad_output)  # a pass per gradient

    register(
        op,
        fake=fake,
        backward=op_backward,
        jvp=jvp,
        vmap=folded(op, batch_dims, batch_dims[:1]),
        sharding=sharding,
        autocast=REGION,
        flops=flops,
        decomposition=decomposition,
    )
    register(
        op_backward,
        fake=fake_backward,
        backward=backward_of_backward,
        jvp=jvp_of_backward,
        vmap=folded(op_backward, (batch_dims[0], *batch_dims[:2]), batch_dims, mask=True),
        sharding=sharding_of_backward,
        flops=flops_backward,
    )
