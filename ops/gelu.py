"""GELU in its sigmoid form: gelu(x) = x · σ(1.702 x)."""

from typing import Any

import torch
from torch import Tensor, nn

from ops import _library

_gelu = torch.ops.lenet_ops.gelu.default
_gelu_backward = torch.ops.lenet_ops.gelu_backward.default

SLOPE = 1.702


def gelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, sigmoid approximation (known as QuickGELU).

    gelu(x) = x · σ(1.702 x), and gelu'(x) = s + 1.702 x s (1 − s) with s = σ(1.702 x).
    Hendrycks & Gimpel, Gaussian Error Linear Units, arXiv 1606.08415, section 2.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.

    Returns:
        A tensor of the shape, dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: another dtype.
    """
    _library.check_tensor("gelu", "input", input)
    return _gelu(input)


class GELU(nn.Module):
    """Applies :func:`gelu` element by element: any shape in, the same shape out."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns gelu(input)."""
        return gelu(input)


@torch.library.register_fake("lenet_ops::gelu")
def _(input: Tensor) -> Tensor:
    return torch.empty_like(input)


@torch.library.register_fake("lenet_ops::gelu_backward")
def _(grad_output: Tensor, input: Tensor) -> Tensor:
    torch._check(
        grad_output.shape == input.shape,
        lambda: (
            f"gelu_backward: grad_output must have the shape of input ({list(input.shape)}), "
            f"got {list(grad_output.shape)}"
        ),
    )
    return torch.empty_like(input)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_output: Tensor) -> Tensor:
    (input,) = ctx.saved_tensors
    return _gelu_backward(grad_output, input)


def _double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """For grad_input = g · gelu'(x): gelu''(x) = 1.702 s (1 − s) (2 + 1.702 x (1 − 2 s))."""
    grad_output, input = ctx.saved_tensors
    by_grad_output = by_input = None
    if ctx.needs_input_grad[0]:
        by_grad_output = _gelu_backward(grad, input)
    if ctx.needs_input_grad[1]:
        s = torch.sigmoid(SLOPE * input)
        second = SLOPE * s * (1 - s) * (2 + SLOPE * input * (1 - 2 * s))
        by_input = grad * grad_output * second
    return by_grad_output, by_input


def _vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int | None]:
    return _gelu(input), in_dims[0]


def _vmap_backward(
    info: Any, in_dims: tuple[int | None, int | None], grad_output: Tensor, input: Tensor
) -> tuple[Tensor, int]:
    grad_output, input = _library.batch_first(info, in_dims, grad_output, input)
    return _gelu_backward(grad_output, input), 0


_library.register_autograd(_gelu, _setup, _backward, _vmap)
_library.register_autograd(_gelu_backward, _setup, _double_backward, _vmap_backward)
