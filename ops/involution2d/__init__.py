"""Involution: one kernel per output pixel, shared by the channels of a group."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.core import check, windows
from ops.core.calls import public
from ops.core.sharding import Strategies
from ops.core.torch_private import is_traced
from ops.core.windows import Size

_involution = torch.ops.lenet_ops.involution2d.default
_involution_backward = torch.ops.lenet_ops.involution2d_backward.default


def involution2d(
    input: Tensor, weight: Tensor, stride: Size = 1, padding: Size = 0, dilation: Size = 1
) -> Tensor:
    """Apply involution: each output pixel has its own kernel (Li et al., CVPR 2021).

    out[n, c, i, j] = Σ weight[n, g, a, b, i, j] · x[n, c, i sH − pH + a dH, j sW − pW + b dW]
    with g = ⌊c G / C⌋ and x zero outside the image;
    Ho = ⌊(H + 2 pH − dH (kH − 1) − 1) / sH⌋ + 1, and Wo likewise. See arXiv 2103.06255.

    Args:
        input: [N, C, H, W], any strides; float64, float32, bfloat16 or float16.
        weight: [N, G, kH, kW, Ho, Wo] where G divides C, dtype and device of `input`. Copied unless
            contiguous, or `image.view(N, G, kH, kW, Ho, Wo)` of a channels-last image
            [N, G kH kW, Ho, Wo].
        stride: step of the kernel, int or pair; at least 1.
        padding: int or pair, zeros added on both sides; at least 0, may exceed the kernel.
        dilation: spacing between kernel taps, int or pair; at least 1.

    Returns:
        [N, C, Ho, Wo] in the dtype and memory format of `input`.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        RuntimeError: mismatched shapes, dtypes or devices, values out of range.
    """
    return _call(input, weight, stride, padding, dilation)


_call = public(involution2d, _involution)


class Involution2d(nn.Module):
    """Apply :func:`involution2d` with kernels generated from the input.

    weight = span(relu(norm(reduce(pool(x))))), where `reduce` and `span` are 1×1 convolutions to
    C / reduction_ratio and to G kH kW channels, `norm` is batch normalisation, and `pool` averages
    windows of the size of the stride. The padding is kernel_size // 2: stride 1 keeps the size of
    the image. [N, C, H, W] → [N, C, ⌈H / sH⌉, ⌈W / sW⌉].

    Args:
        channels: number of input and output channels, C.
        kernel_size: odd kernel size, int or pair.
        stride: step of the kernel, int or pair.
        group_channels: number of channels that share a kernel, C / G; must divide C.
        reduction_ratio: `reduce` has max(1, C // reduction_ratio) output channels.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Size,
        stride: Size = 1,
        group_channels: int = 16,
        reduction_ratio: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check.positive(name, channels=channels, group_channels=group_channels)
        check.positive(name, reduction_ratio=reduction_ratio)
        self.channels = channels
        self.kernel_size, self.stride = windows.pairs(name, kernel_size=kernel_size, stride=stride)
        self.group_channels = group_channels
        self.reduction_ratio = reduction_ratio
        if channels % group_channels:
            raise ValueError(
                f"{name}: group_channels must divide channels = {channels}, got {group_channels}"
            )
        if not all(side % 2 for side in self.kernel_size):
            raise ValueError(f"{name}: kernel_size must be odd, got {kernel_size}")
        self.padding = (self.kernel_size[0] // 2, self.kernel_size[1] // 2)
        reduced = max(1, channels // reduction_ratio)
        weights = channels // group_channels * self.kernel_size[0] * self.kernel_size[1]
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        pool = nn.AvgPool2d(self.stride, self.stride, ceil_mode=True)
        self.pool = nn.Identity() if self.stride == (1, 1) else pool
        self.reduce = nn.Conv2d(channels, reduced, 1, bias=False, **factory)
        self.norm = nn.BatchNorm2d(reduced, **factory)
        self.act = nn.ReLU()
        self.span = nn.Conv2d(reduced, weights, 1, **factory)

    def make_weight(self, input: Tensor) -> Tensor:
        """Generate the kernels [N, G, kH, kW, Ho, Wo] from `input` [N, C, H, W]."""
        image = self.span(self.act(self.norm(self.reduce(self.pool(input)))))
        groups = self.channels // self.group_channels
        weight: Tensor = image.unflatten(1, (groups, *self.kernel_size))
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the involution of `input` [N, C, H, W]."""
        _check_input(input, self.channels)
        return involution2d(input, self.make_weight(input), self.stride, self.padding)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"group_channels={self.group_channels}, reduction_ratio={self.reduction_ratio}"
        )


def _check_input(input: Tensor, channels: int) -> None:
    check.tensor("Involution2d", "input", input)
    if input.dim() != 4 or (not is_traced() and input.shape[1] != channels):
        raise RuntimeError(
            f"Involution2d: input must have shape [N, {channels}, H, W], got {list(input.shape)}"
        )


torch.fx.wrap("_check_input")


def _check_fakes(op: str, input: Tensor, weight: Tensor, *geometry: list[int]) -> list[int]:
    """Check the arguments of a fake; return the output's height and width."""
    windows.check_image(op, input)
    check.argument(op, "weight", weight.dim() == 6 and min(weight.shape[1:4]) > 0)
    groups, kernel = weight.shape[1], weight.shape[2:4]
    check.argument(op, "weight", input.shape[1] % groups == 0)
    size = windows.output_size(op, input.shape[2:], kernel, *geometry)
    check.same(op, "weight", weight, (input.shape[0], groups, *kernel, *size), input.dtype)
    return size


def _decompose(input: Tensor, weight: Tensor, *geometry: Sequence[int]) -> Tensor:
    stride, padding, dilation = ((*sizes,) for sizes in geometry)
    n, c, *_ = input.shape
    groups, kernel, size = weight.shape[1], weight.shape[2:4], weight.shape[4:]
    columns = F.unfold(input, (*kernel,), dilation, padding, stride)
    columns = columns.view(n, groups, c // groups, prod(kernel), *size)
    return (columns * weight.flatten(2, 3).unsqueeze(2)).sum(3).view(n, c, *size)


def _sharding(outputs: int, *args: Any) -> Strategies:
    """Shard samples, or groups of channels: the forward pass has one output, backward two."""
    weight = args[outputs]
    even = all(weight.shape[1] % weight.mesh.size(i) == 0 for i in range(weight.mesh.ndim))
    return [((d,) * outputs, (d,) * (outputs + 1)) for d in (None, 0, *([1] if even else []))]


# Images are independent, so vmap folds the mapped dimension into N.
windows.register_bilinear(
    _involution,
    _involution_backward,
    check_arguments=_check_fakes,
    batch_dims=(0, 0),
    sharding=partial(_sharding, 1),
    sharding_of_backward=partial(_sharding, 2),
    decomposition=_decompose,
)
