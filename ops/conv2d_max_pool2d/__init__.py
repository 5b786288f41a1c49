"""Convolution followed by max pooling, with a gradient that skips the pixels not chosen."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ops.core import check, layout, windows
from ops.core.families import folded
from ops.core.memory import convert_out_of_memory
from ops.core.registration import REGION, register
from ops.core.torch_private import direct
from ops.core.windows import Size

_conv = torch.ops.lenet_ops.conv2d_max_pool2d.default
_conv_backward = torch.ops.lenet_ops.conv2d_max_pool2d_backward.default


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

    The gradient of the convolution's output has at most one non-zero pixel in each pooling window.
    In float32 on the CPU, the gradients are computed from these pixels alone for batches of 32
    small images or more (limits: ``covers`` in cpu/dispatch.cpp). Products of zero gradients with
    infinite or NaN elements are then left out. Otherwise PyTorch's convolution runs, or
    `depthwise_conv2d` for one input channel on the CPU: on CUDA the operator is no faster, and
    ``torch.backends.cudnn`` decides its precision and determinism. Autograd saves the input and the
    indices of the maxima, but not the convolution's output.

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
    except Exception:
        check.image("conv2d_max_pool2d", input)
        check.tensor("conv2d_max_pool2d", "weight", weight)
        if bias is not None:
            check.tensor("conv2d_max_pool2d", "bias", bias)
        _pairs(stride, padding, dilation, pool)
        raise


def _fallback(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Size) -> Tensor:
    return _convolve(input, weight, bias, *_pairs(*geometry))


def _pairs(stride: Size, padding: Size, dilation: Size, pool: Size) -> list[tuple[int, int]]:
    return windows.pairs(
        "conv2d_max_pool2d", stride=stride, padding=padding, dilation=dilation, pool=pool
    )


@convert_out_of_memory
def _convolve(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Size) -> Tensor:
    """Call the operator on [N, C, H, W] or [C, H, W]; `geometry` has the schema's types."""
    check.tensor("conv2d_max_pool2d", "input", input)
    if input.dim() != 3:
        output: Tensor = _conv(input, weight, bias, *geometry)[0]
        return output
    return _conv(input.unsqueeze(0), weight, bias, *geometry)[0].squeeze(0)


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
        """Show the arguments of ``nn.Conv2d`` and the size of the pooling windows."""
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
    windows.check_pair(op, "pool", pool)
    torch._check(
        pool[0] <= height and pool[1] <= width,
        lambda: (
            f"{op}: pool must be at most the {height} x {width} pixels of the convolution, "
            f"got {list(pool)}"
        ),
    )
    return [height // pool[0], width // pool[1]]


def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]
) -> tuple[Tensor, Tensor]:
    op = "conv2d_max_pool2d"
    size = _output_size(op, input, weight, *geometry)
    if bias is not None:
        check.matches(op, "bias", bias, weight.shape[:1], "input", input)
    shape = (input.shape[0], weight.shape[0], *size)
    out = layout.empty(input, shape, layout.is_channels_last(input))
    return out, torch.empty_like(out, dtype=windows.index_type(geometry[3]))


def _fake_backward(
    grad_output: Tensor, indices: Tensor, input: Tensor, weight: Tensor, *geometry_and_mask: Any
) -> tuple[Tensor, ...]:
    op = "conv2d_max_pool2d_backward"
    *geometry, mask = geometry_and_mask
    shape = (input.shape[0], weight.shape[0], *_output_size(op, input, weight, *geometry))
    check.matches(op, "grad_output", grad_output, shape, "input", input)
    check.same_shape(op, "indices", indices, shape)
    check.dtype(op, "indices", indices, windows.index_type(geometry[3]))
    image = layout.resized(input, *input.shape[2:])
    grads = (image, weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1]))
    return windows.select(op, mask, *grads)


def _apply(input: Tensor, weight: Tensor, indices: Tensor, *geometry: Any) -> Tensor:
    """Compute the pixels of the convolution at the indices of the maxima."""
    *spacing, pool = geometry
    image = torch.conv2d(input, weight, None, *spacing)
    return windows.gather(image, indices, pool, pool, (0, 0), (1, 1))


_output_tangent, _derivatives = windows.bilinear(_conv_backward, _apply, saved=1)


def _jvp(
    args: Sequence[Any], outputs: Sequence[Tensor], tangents: windows.Tangents
) -> tuple[Tensor | None, None]:
    input, weight, _, *geometry = args
    rest = (outputs[1], *geometry)
    return _output_tangent(input, weight, rest, tangents[:3], outputs[0]), None


def _flops(input: Any, weight: Sequence[int], *rest: Any, out_shape: Any) -> int:
    """Count a multiplication and an addition for each tap of each pixel in a pooling window."""
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
    **_derivatives,
    vmap=folded(_conv_backward, (0, 0, 0, None), (0, None, None), mask=True),
    flops=_flops_backward,
)
