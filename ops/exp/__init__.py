"""Exponential function. The derivative is the output."""

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ops.core import check
from ops.core.families import elementwise
from ops.core.registration import register
from ops.core.torch_private import direct

_exp = torch.ops.lenet_ops.exp.default
_exp_direct = direct(_exp)
_exp_backward = torch.ops.lenet_ops.exp_backward.default


def exp(input: Tensor) -> Tensor:
    """Compute eˣ, element by element. The derivative is the output: exp' = exp.

    CUDA autocast computes in float32, as for torch.exp.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.

    Returns:
        A tensor of the shape, dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: an unsupported dtype.
    """
    try:
        return (_exp if is_dynamo_compiling() else _exp_direct)(input)
    except Exception:
        check.tensor("exp", "input", input)
        raise


torch.fx.wrap("exp")  # one node in torch.fx graphs


class Exp(nn.Module):
    """Apply :func:`exp` element by element: any shape in, the same shape out."""

    def forward(self, input: Tensor) -> Tensor:
        """Return exp(input)."""
        return exp(input)


register(
    _exp,
    **elementwise(_exp, "exp_backward(grad, output)"),
    autocast={"cuda": torch.float32},
)
_partials = (  # by grad_output, by output
    lambda x, grad_output, output: _exp_backward(x, output),
    lambda x, grad_output, output: _exp_backward(x, grad_output),
)
register(_exp_backward, **elementwise(_exp_backward, _partials))
