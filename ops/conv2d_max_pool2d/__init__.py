"""Convolution followed by max pooling, with a gradient that skips the pixels not chosen."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ops.core import check, layout, windows
from ops.core.families import folded, total
from ops.core.memory import repeat_allocation
from ops.core.registration import REGION, register
from ops.core.torch_private import direct
from ops.core.windows import Size

_conv = torch.ops.lenet_ops.conv2d_max_pool2d.default
_conv_backward = torch.ops.lenet_ops.conv2d_max_pool2d_backward.default

_MAX_UINT8_TAPS = 256  # largest pooling window with uint8 indices, as in max_pool2d

Tangents = Sequence[Tensor | None]


def conv2d_max_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    pool: Size = 2,
) -> Tensor:
    """Compute ``F.max_pool2d(F.conv2d(input, weight, bias, stride, padding, dilation), pool)``.

    The gradient of the convolution's output has one non-zero pixel in each pooling window. On the
    CPU, the float32 gradients of weight and input visit only these, if a row of the filter has at
    most 64 weights (kW · C), its dilation is 1, and the batch has 32 images or more; PyTorch
    computes all others, and the convolution itself. Gradients that are zero are skipped, even for
    infinite inputs and weights. Autograd saves the input and the indices of the maxima.

    Args:
        input: [N, C, H, W] or [C, H, W], any strides; float64, float32, bfloat16 or float16.
        weight: [Co, C, kH, kW], dtype and device of `input`.
        bias: [Co] or None.
        stride: step of the filter, int or pair; at least 1.
        padding: int or pair, zeros added on both sides; at least 0.
        dilation: spacing between filter taps, int or pair; at least 1.
        pool: size of the pooling windows and the step between them, int or pair.

    Returns:
        [N, Co, Ho, Wo] (or [Co, Ho, Wo]) in the dtype and memory format of `input`.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        RuntimeError: mismatched shapes, dtypes or devices, values out of range.
    """
    try:
        call = _fallback if is_dynamo_compiling() else _direct
        output: Tensor = call(input, weight, bias, stride, padding, dilation, pool)
        return output
    except Exception as error:
        _raise_specific_error(error, input, weight, bias, stride, padding, dilation, pool)
        raise


def _fallback(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Size) -> Tensor:
    return _convolve(input, weight, bias, *_pairs(*geometry))


def _pairs(stride: Size, padding: Size, dilation: Size, pool: Size) -> list[tuple[int, int]]:
    op = "conv2d_max_pool2d"
    pairs = windows.pairs(op, stride=stride, padding=padding, dilation=dilation)
    return [*pairs, windows.pair(op, "pool", pool)]


def _convolve(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Size) -> Tensor:
    """Call the operator on [N, C, H, W] or [C, H, W]; `geometry` has the schema's types."""
    try:
        if input.dim() != 3:
            output: Tensor = _conv(input, weight, bias, *geometry)[0]
            return output
        return _conv(input.unsqueeze(0), weight, bias, *geometry)[0].squeeze(0)
    except Exception as error:
        _raise_specific_error(error, input, weight, bias, *geometry)
        raise


def _raise_specific_error(
    error: Exception, input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Size
) -> None:
    op = "conv2d_max_pool2d"
    check.tensor(op, "input", input)
    check.tensor(op, "weight", weight)
    if bias is not None:
        check.tensor(op, "bias", bias)
    check.image(op, input)
    _pairs(*geometry)
    repeat_allocation(error)


_direct = direct(_conv, _fallback, rank=4)

torch.fx.wrap("_convolve")  # one node in torch.fx graphs


class Conv2dMaxPool2d(nn.Conv2d):
    """Apply :func:`conv2d_max_pool2d`, with the arguments and parameters of ``nn.Conv2d``.

    Args:
        in_channels: C.
        out_channels: Co.
        kernel_size: filter size, int or pair.
        pool: size of the pooling windows, int or pair.
        options: stride, padding, dilation, bias, device and dtype of ``nn.Conv2d``.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, pool: Size = 2, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, **options)
        name = type(self).__name__
        self.pool = windows.pair(name, "pool", pool)
        if self.groups != 1 or self.padding_mode != "zeros" or isinstance(self.padding, str):
            raise ValueError(f"{name}: groups must be 1, padding in pixels, padding_mode 'zeros'")

    def forward(self, input: Tensor) -> Tensor:
        """Return the pooled convolution of `input` [N, C, H, W] or [C, H, W]."""
        geometry: Any = (self.stride, self.padding, self.dilation, self.pool)
        return conv2d_max_pool2d(input, self.weight, self.bias, *geometry)

    def extra_repr(self) -> str:
        """Show the arguments that differ from their defaults."""
        return f"{super().extra_repr()}, pool={self.pool}"


def _output_size(op: str, input: Tensor, weight: Tensor, *geometry: Sequence[int]) -> list[int]:
    """Check the arguments as the kernels do; return the output's height and width."""
    *spacing, pool = geometry
    windows.check_image(op, input)
    torch._check(
        weight.dim() == 4 and weight.shape[1] == input.shape[1] and min(weight.shape) > 0,
        lambda: (
            f"{op}: weight must have shape [Co, C, kH, kW] with C = {input.shape[1]}, "
            f"got {list(weight.shape)}"
        ),
    )
    check.matches(op, "weight", weight, weight.shape, "input", input)
    height, width = windows.output_size(op, input.shape[2:], weight.shape[2:], *spacing)
    if len(pool) != 2 or min(pool) < 1:
        raise RuntimeError(f"{op}: pool must be two integers, at least 1, got {list(pool)}")
    torch._check(
        pool[0] <= height and pool[1] <= width,
        lambda: (
            f"{op}: pool must be at most the {height} x {width} pixels of the convolution, "
            f"got {list(pool)}"
        ),
    )
    return [height // pool[0], width // pool[1]]


def _index_type(pool: Sequence[int]) -> torch.dtype:
    return torch.uint8 if pool[0] * pool[1] <= _MAX_UINT8_TAPS else torch.int64


def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]
) -> tuple[Tensor, Tensor]:
    op = "conv2d_max_pool2d"
    size = _output_size(op, input, weight, *geometry)
    if bias is not None:
        check.matches(op, "bias", bias, weight.shape[:1], "input", input)
    shape = (input.shape[0], weight.shape[0], *size)
    out = layout.empty(input, shape, layout.is_channels_last(input))
    return out, torch.empty_like(out, dtype=_index_type(geometry[3]))


def _fake_backward(
    grad_output: Tensor, indices: Tensor, input: Tensor, weight: Tensor, *geometry_and_mask: Any
) -> tuple[Tensor, ...]:
    op = "conv2d_max_pool2d_backward"
    *geometry, mask = geometry_and_mask
    shape = (input.shape[0], weight.shape[0], *_output_size(op, input, weight, *geometry))
    check.matches(op, "grad_output", grad_output, shape, "input", input)
    check.same_shape(op, "indices", indices, shape)
    check.dtype(op, "indices", indices, _index_type(geometry[3]))
    if len(mask) != 3:
        raise RuntimeError(f"{op}: output_mask must be three booleans")
    image = layout.resized(input, *input.shape[2:])
    grads = (image, weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1]))
    return tuple(
        grad if needed else weight.new_empty([0]) for grad, needed in zip(grads, mask, strict=True)
    )


def _choose(image: Tensor, indices: Tensor, pool: Sequence[int]) -> Tensor:
    """Gather the pixels of the convolution `image` at the indices of the maxima."""
    tap = indices.long()
    starts = [
        torch.arange(n, device=image.device) * k
        for n, k in zip(indices.shape[2:], pool, strict=True)
    ]
    row, column = tap // pool[1] + starts[0][:, None], tap % pool[1] + starts[1]
    flat = (*image.shape[:2], -1)  # flatten has no vmap rule in forward mode
    pixel = (row * image.shape[3] + column).reshape(flat)
    return image.reshape(flat).gather(2, pixel).reshape(indices.shape)


def _output_tangent(
    input: Tensor, weight: Tensor, indices: Tensor, geometry: Sequence[Any], tangents: Tangents
) -> Tensor | None:
    """Return the tangent of the pooled output."""
    *spacing, pool = geometry
    input_t, weight_t, bias_t = tangents
    image = total(
        None if input_t is None else torch.conv2d(input_t, weight, None, *spacing),
        None if weight_t is None else torch.conv2d(input, weight_t, None, *spacing),
    )
    return total(
        None if image is None else _choose(image, indices, pool),
        None if bias_t is None else bias_t[:, None, None].expand(indices.shape),
    )


def _jvp(
    args: Sequence[Any], outputs: Sequence[Tensor], tangents: Tangents
) -> tuple[Tensor | None, None]:
    input, weight, _, *geometry = args
    return _output_tangent(input, weight, outputs[1], geometry, tangents[:3]), None


def _double_backward(
    args: Sequence[Any], grads: Tangents, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of grad_output, input and weight."""
    grad_output, indices, input, weight, *geometry, mask = args
    gg_input, gg_weight, gg_bias = (g if m else None for g, m in zip(grads, mask, strict=True))
    gg_output = grad_input = grad_weight = None
    if needed[0]:
        tangents = (gg_input, gg_weight, gg_bias)
        gg_output = _output_tangent(input, weight, indices, geometry, tangents)
    if needed[2] and gg_weight is not None:
        only = [True, False, False]
        grad_input = _conv_backward(grad_output, indices, input, gg_weight, *geometry, only)[0]
    if needed[3] and gg_input is not None:
        only = [False, True, False]
        grad_weight = _conv_backward(grad_output, indices, gg_input, weight, *geometry, only)[1]
    return gg_output, None, grad_input, grad_weight


def _jvp_backward(
    args: Sequence[Any], outputs: Sequence[Tensor], tangents: Tangents
) -> tuple[Tensor, ...]:
    grad_output, indices, input, weight, *geometry, mask = args
    grad_output_t, _, input_t, weight_t = tangents[:4]
    outputs_t = list(map(torch.zeros_like, outputs))

    def add(grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]) -> None:
        grads = _conv_backward(grad, indices, input, weight, *geometry, mask)
        for i in range(3):
            if mask[i]:
                outputs_t[i] = outputs_t[i] + grads[i]

    if grad_output_t is not None:
        add(grad_output_t, input, weight, mask)
    if input_t is not None and mask[1]:
        add(grad_output, input_t, weight, [False, True, False])
    if weight_t is not None and mask[0]:
        add(grad_output, input, weight_t, [True, False, False])
    return tuple(outputs_t)


def _flops(input: Any, weight: Sequence[int], *rest: Any, out_shape: Any) -> int:
    """Count a multiplication and an addition for each tap of each pixel before pooling."""
    pool = rest[-1]
    return 2 * math.prod(out_shape[0]) * math.prod(pool) * math.prod(weight[1:])


def _flops_backward(
    grad_output: Sequence[int],
    _: Any,
    input: Any,
    weight: Sequence[int],
    *rest: Any,
    out_shape: Any,
) -> int:
    """Count one multiplication and addition for each tap of each maximum, in each gradient."""
    return 2 * sum(rest[-1][:2]) * math.prod(grad_output) * math.prod(weight[1:])


register(
    _conv,
    fake=_fake,
    backward="conv2d_max_pool2d_backward(grads[0], indices, input, weight, stride, padding, "
    "dilation, pool, grad_input_mask)",
    jvp=_jvp,
    vmap=folded(_conv, (0, None, None), (0, 0)),
    autocast=REGION,
    flops=_flops,
)
register(
    _conv_backward,
    fake=_fake_backward,
    backward=_double_backward,
    jvp=_jvp_backward,
    vmap=folded(_conv_backward, (0, 0, 0, None), (0, None, None), mask=True),
    flops=_flops_backward,
)
