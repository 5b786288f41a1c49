"""Depthwise convolution: one filter per channel."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.core import check, windows
from ops.core.calls import public
from ops.core.windows import Size

_conv = torch.ops.lenet_ops.depthwise_conv2d.default
_conv_backward = torch.ops.lenet_ops.depthwise_conv2d_backward.default


def depthwise_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
) -> Tensor:
    """Convolve each channel with its own filter, as ``F.conv2d(..., groups=C)``.

    out[n, c, i, j] = bias[c] + Σ weight[c, 0, a, b] · x[n, c, i sH − pH + a dH, j sW − pW + b dW]
    with x zero outside the image; Ho = ⌊(H + 2 pH − dH (kH − 1) − 1) / sH⌋ + 1, and Wo likewise.
    Padding adds nothing to output and input gradient, even for an infinite image. With non-finite
    weights, both may be NaN (0 · ∞). With a non-finite input or output gradient, the weight
    gradient of the same channel may be NaN.

    Args:
        input: [N, C, H, W] or [C, H, W], any strides; float64, float32, bfloat16 or float16.
        weight: [C, 1, kH, kW], dtype and device of `input`.
        bias: [C] or None.
        stride: step of the filter, int or pair; at least 1.
        padding: int or pair, zeros added on both sides; at least 0, may exceed the kernel.
        dilation: spacing between filter taps, int or pair; at least 1.

    Returns:
        [N, C, Ho, Wo] (or [C, Ho, Wo]) in the dtype and memory format of `input`.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        RuntimeError: mismatched shapes, dtypes or devices, values out of range.
    """
    return _call(input, weight, bias, stride, padding, dilation)


_call = public(depthwise_conv2d, _conv, rank=4)


class DepthwiseConv2d(nn.Conv2d):
    """Apply :func:`depthwise_conv2d`, with parameters and initialisation of ``nn.Conv2d``.

    The same as ``nn.Conv2d(channels, channels, ..., groups=channels)``, also the state dict.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check.positive(name, channels=channels)
        check.boolean(name, "bias", bias)
        kernel_size, stride, padding, dilation = windows.pairs(
            name, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation
        )
        super().__init__(
            channels,
            channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups=channels,
            bias=bias,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of `input` [N, C, H, W] or [C, H, W]."""
        geometry: Any = (self.stride, self.padding, self.dilation)
        return depthwise_conv2d(input, self.weight, self.bias, *geometry)


def _check_fakes(op: str, input: Tensor, weight: Tensor, *geometry: list[int]) -> list[int]:
    """Check the arguments of a fake; return the output's height and width."""
    windows.check_image(op, input)
    check.argument(op, "weight", weight.dim() == 4 and min(weight.shape[2:]) > 0)
    check.same(op, "weight", weight, (input.shape[1], 1, *weight.shape[2:]), input.dtype)
    return windows.output_size(op, input.shape[2:], weight.shape[2:], *geometry)


def _decompose(
    input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sequence[int]
) -> Tensor:
    stride, padding, dilation = ((*sizes,) for sizes in geometry)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups=input.shape[1])


# Channels are independent, so vmap folds the mapped dimension into them.
windows.register_bilinear(
    _conv,
    _conv_backward,
    check_arguments=_check_fakes,
    batch_dims=(1, 0, 0),
    sharding=[((0,), (0, None, None)), ((1,), (1, 0, 0))],
    sharding_of_backward=[((0, "sum", "sum"), (0, 0, None)), ((1, 0, 0), (1, 1, 0))],
    decomposition=_decompose,
)
