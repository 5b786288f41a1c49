"""Global average pooling: the mean of each channel of an image."""

import torch
from torch import Tensor, nn

from ops.core import check, layout, windows
from ops.core.calls import public
from ops.core.registration import register
from ops.core.rules import folded, linear
from ops.core.sharding import Strategies

_pool = torch.ops.lenet_ops.global_avg_pool2d.default
_pool_backward = torch.ops.lenet_ops.global_avg_pool2d_backward.default


def global_avg_pool2d(input: Tensor) -> Tensor:
    """Average each channel over height and width, as ``F.adaptive_avg_pool2d(input, 1)``.

    out[n, c, 0, 0] = Σ x[n, c, i, j] / (H W), summed in at least float32.
    grad_x[n, c, i, j] = grad_out[n, c, 0, 0] / (H W).
    Lin, Chen & Yan, Network In Network, arXiv 1312.4400, section 3.2.

    Args:
        input: [N, C, H, W] or [C, H, W], any strides; float64, float32, bfloat16 or float16.

    Returns:
        [N, C, 1, 1] (or [C, 1, 1]) in the dtype and memory format of `input`; NaN if H or W is 0.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: an unsupported dtype.
        RuntimeError: `input` has neither 3 nor 4 dimensions.
    """
    return _call(input)


_call = public(global_avg_pool2d, _pool, rank=4)


class GlobalAvgPool2d(nn.Module):
    """Apply :func:`global_avg_pool2d`: [N, C, H, W] in, [N, C, 1, 1] out."""

    def forward(self, input: Tensor) -> Tensor:
        """Return global_avg_pool2d(input)."""
        return global_avg_pool2d(input)


def _fake(input: Tensor) -> Tensor:
    windows.check_image("global_avg_pool2d", input)
    return layout.resized(input, 1, 1)


def _fake_backward(grad_output: Tensor, height: int, width: int, channels_last: bool) -> Tensor:
    op = "global_avg_pool2d_backward"
    images_and_channels = grad_output.shape[:2]
    check.same(op, "grad_output", grad_output, (*images_and_channels, 1, 1), grad_output.dtype)
    check.argument(op, "height or width", height >= 0 and width >= 0)
    return layout.empty(grad_output, (*images_and_channels, height, width), channels_last)


_SHARDING: Strategies = [((0,), (0,)), ((1,), (1,))]  # samples or channels

# Autograd saves only the size and memory format of the image.
register(
    _pool,
    **linear(_pool, _pool_backward),
    fake=_fake,
    vmap=folded(_pool, (0,), (0,)),
    sharding=_SHARDING,
    decomposition=lambda image: image.mean((2, 3), keepdim=True),
)
register(
    _pool_backward,
    **linear(_pool_backward, lambda grad, *image: _pool(grad)),
    fake=_fake_backward,
    vmap=folded(_pool_backward, (0,), (0,)),
    sharding=_SHARDING,
)
