"""GELU, sigmoid approximation: gelu(x) = x · σ(1.702 x)."""

import torch
from torch import Tensor, nn

from ops.core.calls import public
from ops.core.registration import register
from ops.core.rules import elementwise

_gelu = torch.ops.lenet_ops.gelu.default
_gelu_backward = torch.ops.lenet_ops.gelu_backward.default

SLOPE = 1.702


def gelu(input: Tensor) -> Tensor:
    """Apply the sigmoid approximation of the Gaussian error linear unit (QuickGELU).

    gelu(x) = x · σ(1.702 x), and gelu'(x) = s + 1.702 x s (1 − s) with s = σ(1.702 x).
    Hendrycks & Gimpel, Gaussian Error Linear Units, arXiv 1606.08415, section 2.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.

    Returns:
        A tensor of the shape, dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: an unsupported dtype.
    """
    return _call(input)


_call = public(gelu, _gelu)


class GELU(nn.Module):
    """Apply :func:`gelu` element by element: any shape in, the same shape out."""

    def forward(self, input: Tensor) -> Tensor:
        """Return gelu(input)."""
        return gelu(input)


def _decompose(input: Tensor) -> Tensor:
    return input * torch.sigmoid(SLOPE * input)


def _compose_backward(grad_output: Tensor, input: Tensor) -> Tensor:
    s = torch.sigmoid(SLOPE * input)
    return grad_output * (s + SLOPE * input * s * (1 - s))


register(_gelu, **elementwise(_gelu, _gelu_backward), decomposition=_decompose)
register(_gelu_backward, **elementwise(_gelu_backward, _compose_backward))
