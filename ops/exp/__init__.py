"""Exponential function. The derivative is the output: exp' = exp."""

import torch
from torch import Tensor, nn

from ops.core.calls import public
from ops.core.registration import register
from ops.core.rules import elementwise

_exp = torch.ops.lenet_ops.exp.default
_exp_backward = torch.ops.lenet_ops.exp_backward.default


def exp(input: Tensor) -> Tensor:
    """Compute eˣ, element by element: in float32 in CUDA autocast, as torch.exp does.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.

    Returns:
        A tensor of the shape, dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: an unsupported dtype.
    """
    return _call(input)


_call = public(exp, _exp)


class Exp(nn.Module):
    """Apply :func:`exp` element by element: any shape in, the same shape out."""

    def forward(self, input: Tensor) -> Tensor:
        """Return exp(input)."""
        return exp(input)


register(
    _exp,
    **elementwise(_exp, _exp_backward),
    autocast={"cuda": torch.float32},
    decomposition=torch.exp,
)
register(_exp_backward, **elementwise(_exp_backward, torch.mul))  # grad_output · output
