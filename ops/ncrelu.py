"""NCReLU: both halves of the input, as channels of their own."""

from typing import Any

import torch
from torch import Tensor, nn

from ops import _library

_ncrelu = torch.ops.lenet_ops.ncrelu.default
_ncrelu_backward = torch.ops.lenet_ops.ncrelu_backward.default


def ncrelu(input: Tensor, dim: int = 1) -> Tensor:
    """Concatenates the positive and the negative part: concat(max(x, 0), min(x, 0)).

    CReLU (Shang et al., arXiv 1603.05201) with the negative half kept negative, so that the two
    halves sum to x. Gradient: g₊ · [x > 0] + g₋ · [x < 0].

    Args:
        input: [N, C, ...] (any shape and strides that have `dim`); float64, float32, bfloat16 or
            float16.
        dim: the channel dimension; negative counts from the end.

    Returns:
        [N, 2C, ...] in the dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor, or `dim` not an int.
        NotImplementedError: another dtype.
        IndexError: `input` has no dimension `dim`.
    """
    _library.check_tensor("ncrelu", "input", input)
    _library.check_int("ncrelu", "dim", dim)
    if input.dim() == 0:
        raise IndexError("ncrelu: input must have at least one dimension, got a scalar")
    if not -input.dim() <= dim < input.dim():
        raise IndexError(
            f"ncrelu: dim {dim} is out of range for an input of {input.dim()} dimensions; "
            f"allowed are [{-input.dim()}, {input.dim() - 1}]"
        )
    return _ncrelu(input, dim)


torch.fx.wrap("ncrelu")  # one node where a network is traced


class NCReLU(nn.Module):
    """Applies :func:`ncrelu`: [N, C, ...] in, [N, 2C, ...] out.

    Args:
        dim: the channel dimension.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        _library.check_int("NCReLU", "dim", dim)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Returns ncrelu(input, dim)."""
        return ncrelu(input, self.dim)

    def extra_repr(self) -> str:
        """Shows the channel dimension."""
        return f"dim={self.dim}"


def _empty(like: Tensor, dim: int, size: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return torch.empty(
        shape,
        dtype=like.dtype,
        device=like.device,
        memory_format=_library.suggest_memory_format(like),
    )


@_library.register_fake(_ncrelu)
def _(input: Tensor, dim: int) -> Tensor:
    return _empty(input, dim, 2 * input.shape[dim])


@_library.register_fake(_ncrelu_backward)
def _(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    shape = list(input.shape)
    shape[dim] *= 2
    _library.check_fake("ncrelu_backward", "grad_output", grad_output, shape, "input", input)
    return _empty(input, dim, input.shape[dim])


def _setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    input, ctx.dim = inputs
    ctx.save_for_backward(input)


def _backward(ctx: Any, saved: tuple[Tensor], grad_output: Tensor) -> tuple[Tensor, None]:
    (input,) = saved
    return _ncrelu_backward(grad_output, input, ctx.dim), None


def _setup_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    _, input, ctx.dim = inputs
    ctx.save_for_backward(input)


def _double_backward(ctx: Any, saved: tuple[Tensor], grad: Tensor) -> tuple[Tensor, None, None]:
    """grad_input is linear in grad_output and piecewise constant in x."""
    (input,) = saved
    return _split(grad, input, ctx.dim), None, None


def _split(tangent: Tensor, input: Tensor, dim: int) -> Tensor:
    return torch.cat((tangent * (input > 0), tangent * (input < 0)), dim)


def _jvp(inputs: tuple[Tensor, int], outputs: Any, tangents: tuple[Tensor, None]) -> Tensor:
    return _split(tangents[0], *inputs)


def _jvp_backward(
    inputs: tuple[Tensor, Tensor, int], outputs: tuple[Tensor], tangents: tuple[Any, ...]
) -> Tensor:
    of_grad_output, *_ = tangents
    if of_grad_output is None:
        return torch.zeros_like(*outputs)
    return _ncrelu_backward(of_grad_output, *inputs[1:])


def _skip_batch(dim: int) -> int:
    return dim + 1 if dim >= 0 else dim


def _vmap(
    info: Any, in_dims: tuple[int | None, None], input: Tensor, dim: int
) -> tuple[Tensor, int]:
    (input,) = _library.batch_first(info, in_dims[:1], input)
    return _ncrelu(input, _skip_batch(dim)), 0


def _vmap_backward(
    info: Any, in_dims: tuple[int | None, ...], grad_output: Tensor, input: Tensor, dim: int
) -> tuple[Tensor, int]:
    grad_output, input = _library.batch_first(info, in_dims[:2], grad_output, input)
    return _ncrelu_backward(grad_output, input, _skip_batch(dim)), 0


_library.register_autograd(_ncrelu, _setup, _backward, _jvp, _vmap)
_library.register_autograd(
    _ncrelu_backward, _setup_backward, _double_backward, _jvp_backward, _vmap_backward
)
