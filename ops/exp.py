"""The exponential function, whose gradient is its own output."""

from typing import Any

import torch
from torch import Tensor, nn

from ops import _library

_exp = torch.ops.lenet_ops.exp.default
_exp_backward = torch.ops.lenet_ops.exp_backward.default


def exp(input: Tensor) -> Tensor:
    """Exponential function, eˣ. Its gradient is its output: exp' = exp.

    In an autocast region on CUDA it computes in float32, as torch.exp does.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.

    Returns:
        A tensor of the shape, dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor.
        NotImplementedError: another dtype.
    """
    _library.check_tensor("exp", "input", input)
    return _exp(input)


class Exp(nn.Module):
    """Applies :func:`exp` element by element: any shape in, the same shape out."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns exp(input)."""
        return exp(input)


@torch.library.register_fake("lenet_ops::exp")
def _(input: Tensor) -> Tensor:
    return torch.empty_like(input)


@torch.library.register_fake("lenet_ops::exp_backward")
def _(grad_output: Tensor, output: Tensor) -> Tensor:
    torch._check(
        grad_output.shape == output.shape,
        lambda: (
            f"exp_backward: grad_output must have the shape of output ({list(output.shape)}), "
            f"got {list(grad_output.shape)}"
        ),
    )
    return torch.empty_like(output)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad_output: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return _exp_backward(grad_output, output)


def _setup_backward(ctx: Any, inputs: tuple[Tensor, Tensor], grad_input: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """grad_input = grad_output · output is linear in both."""
    grad_output, output = ctx.saved_tensors
    by_grad_output, by_output = ctx.needs_input_grad
    return (
        _exp_backward(grad, output) if by_grad_output else None,
        _exp_backward(grad, grad_output) if by_output else None,
    )


def _vmap(info: Any, in_dims: tuple[int | None], input: Tensor) -> tuple[Tensor, int | None]:
    return _exp(input), in_dims[0]


def _vmap_backward(
    info: Any, in_dims: tuple[int | None, int | None], grad_output: Tensor, output: Tensor
) -> tuple[Tensor, int]:
    grad_output, output = _library.batch_first(info, in_dims, grad_output, output)
    return _exp_backward(grad_output, output), 0


_library.register_autocast(_exp, "cuda", torch.float32)  # as torch.exp
_library.register_autograd(_exp, _setup, _backward, _vmap)
_library.register_autograd(_exp_backward, _setup_backward, _double_backward, _vmap_backward)
