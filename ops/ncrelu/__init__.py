"""NCReLU: both halves of the input, as channels of their own."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ops.core import library

_ncrelu = torch.ops.lenet_ops.ncrelu.default
_ncrelu_backward = torch.ops.lenet_ops.ncrelu_backward.default
_with_signs = torch.ops.lenet_ops.ncrelu_with_signs.default
_with_signs_backward = torch.ops.lenet_ops.ncrelu_with_signs_backward.default

_PER_BYTE = 4  # elements whose signs a byte keeps, as in the kernels
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def ncrelu(input: Tensor, dim: int = 1) -> Tensor:
    """Concatenates the positive and the negative part: concat(max(x, 0), min(x, 0)).

    CReLU (Shang et al., arXiv 1603.05201) with the negative half kept negative, so that the two
    halves sum to x. Gradient: g₊ · [x > 0] + g₋ · [x < 0]. All that is kept for it are two bits an
    element; the input may go, or change (not under torch.func's transforms and in forward mode,
    which keep it).

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
    library.check_tensor("ncrelu", "input", input)
    library.check_int("ncrelu", "dim", dim)
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
        library.check_int("NCReLU", "dim", dim)
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
        memory_format=library.suggest_memory_format(like),
    )


@library.register_fake(_ncrelu)
def _(input: Tensor, dim: int) -> Tensor:
    return _empty(input, dim, 2 * input.shape[dim])


@library.register_fake(_ncrelu_backward)
def _(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    shape = list(input.shape)
    shape[dim] *= 2
    library.check_fake("ncrelu_backward", "grad_output", grad_output, shape, "input", input)
    return _empty(input, dim, input.shape[dim])


def _sign_bytes(elements: Any) -> Any:
    return (elements + _PER_BYTE - 1) // _PER_BYTE


@library.register_fake(_with_signs)
def _(input: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    signs = input.new_empty((_sign_bytes(input.numel()),), dtype=torch.uint8)
    return _empty(input, dim, 2 * input.shape[dim]), signs


@library.register_fake(_with_signs_backward)
def _(grad_output: Tensor, signs: Tensor, dim: int, channels_last: bool) -> Tensor:
    op = "ncrelu_with_signs_backward"
    shape = list(grad_output.shape)
    torch._check(
        shape[dim] % 2 == 0,
        lambda: f"{op}: grad_output must have an even size in dimension {dim}, got {shape}",
    )
    torch._check(
        not channels_last or len(shape) in _CHANNELS_LAST,
        lambda: f"{op}: channels_last needs a grad_output of 4 or 5 dimensions, got {shape}",
    )
    shape[dim] //= 2
    size = _sign_bytes(prod(shape))
    torch._check(
        tuple(signs.shape) == (size,),
        lambda: f"{op}: signs must have shape [{size}], got {list(signs.shape)}",
    )
    torch._check(
        signs.dtype == torch.uint8, lambda: f"{op}: signs must have dtype uint8, got {signs.dtype}"
    )
    return torch.empty(
        shape,
        dtype=grad_output.dtype,
        device=grad_output.device,
        memory_format=_CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format,
    )


# What ncrelu itself keeps is its input: for torch.func and forward mode, which differentiate more
# than once and map over what is kept.


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
    return _halves(tangent, input > 0, input < 0, dim)


def _halves(x: Tensor, positive: Tensor, negative: Tensor, dim: int) -> Tensor:
    return torch.cat((torch.where(positive, x, 0), torch.where(negative, x, 0)), dim)


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
    (input,) = library.batch_first(info, in_dims[:1], input)
    return _ncrelu(input, _skip_batch(dim)), 0


def _vmap_backward(
    info: Any, in_dims: tuple[int | None, ...], grad_output: Tensor, input: Tensor, dim: int
) -> tuple[Tensor, int]:
    grad_output, input = library.batch_first(info, in_dims[:2], grad_output, input)
    return _ncrelu_backward(grad_output, input, _skip_batch(dim)), 0


# What runs in its place where autograd records it keeps the signs.


def _setup_with_signs(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    input, dim = inputs
    signs = output[1]
    ctx.save_for_backward(signs)
    ctx.mark_non_differentiable(signs)
    ctx.set_materialize_grads(False)  # or a gradient of the signs would be made, of zeros
    ctx.rest = dim, library.suggest_memory_format(input) != torch.contiguous_format


def _backward_with_signs(
    ctx: Any, saved: tuple[Tensor], grad_output: Tensor, _: None
) -> tuple[Tensor, None]:
    return _with_signs_backward(grad_output, *saved, *ctx.rest), None


def _jvp_with_signs(
    inputs: tuple[Tensor, int], outputs: Any, tangents: tuple[Tensor, None]
) -> tuple[Tensor, None]:
    return _jvp(inputs, outputs, tangents), None


def _setup_with_signs_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, signs, *ctx.rest = inputs
    ctx.save_for_backward(signs)


def _double_backward_with_signs(
    ctx: Any, saved: tuple[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    dim, channels_last = ctx.rest
    positive, negative = _unpack(*saved, grad.shape, channels_last)
    return _halves(grad, positive, negative, dim), None, None, None


def _unpack(signs: Tensor, shape: torch.Size, channels_last: bool) -> list[Tensor]:
    """Which elements of an input of that shape are > 0, and which < 0."""
    bits = signs.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=signs.device) & 1
    sizes = (shape[0], *shape[2:], shape[1]) if channels_last else shape  # as they lie in memory
    flat = bits.view(-1, 2)[: prod(shape)].bool()
    masks = [mask.reshape(sizes) for mask in flat.unbind(1)]
    return [mask.movedim(-1, 1) for mask in masks] if channels_last else masks


def _jvp_with_signs_backward(
    inputs: tuple[Any, ...], outputs: Any, tangents: tuple[Any, ...]
) -> Tensor:
    grad: Tensor = _with_signs_backward(tangents[0], *inputs[1:])
    return grad


def _vmap_with_signs(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    return library.one_by_one(_with_signs, info, in_dims, *args)


def _vmap_with_signs_backward(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    (grads,), _ = library.one_by_one(
        lambda *sample: (_with_signs_backward(*sample),), info, in_dims, *args
    )
    return grads, 0


library.register_autograd(_ncrelu, _setup, _backward, _jvp, _vmap, recorded=_with_signs)
library.register_autograd(
    _ncrelu_backward, _setup_backward, _double_backward, _jvp_backward, _vmap_backward
)
library.register_autograd(
    _with_signs, _setup_with_signs, _backward_with_signs, _jvp_with_signs, _vmap_with_signs
)
library.register_autograd(
    _with_signs_backward,
    _setup_with_signs_backward,
    _double_backward_with_signs,
    _jvp_with_signs_backward,
    _vmap_with_signs_backward,
)
