"""NCReLU: positive and negative part of the input, concatenated along the channels."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.core import check, layout
from ops.core.calls import public
from ops.core.composition import derivatives_of
from ops.core.registration import register
from ops.core.rules import Dims, batch_first, linear, loop_over_samples
from ops.core.sharding import Strategies, without_redistribution

_ncrelu = torch.ops.lenet_ops.ncrelu.default
_with_signs = torch.ops.lenet_ops.ncrelu_with_signs.default
_with_signs_backward = torch.ops.lenet_ops.ncrelu_with_signs_backward.default


def ncrelu(input: Tensor, dim: int = 1) -> Tensor:
    """Concatenate the positive and the negative part: concat(max(x, 0), min(x, 0)).

    CReLU (Shang et al., arXiv 1603.05201) with the negative half kept negative, so that the two
    halves sum to x. Gradient: g₊ · [x > 0] + g₋ · [x < 0]. Autograd saves two bits per element, so
    the input may be freed or changed in place. torch.func transforms and forward mode save the
    input.

    Args:
        input: [N, C, ...], or any shape that has `dim`; any strides; float64, float32, bfloat16 or
            float16.
        dim: the channel dimension; negative counts from the end.

    Returns:
        [N, 2C, ...] in the dtype and memory format of `input`.

    Raises:
        TypeError: `input` is not a tensor, or `dim` not an int.
        NotImplementedError: an unsupported dtype.
        IndexError: `input` has no dimension `dim`.
    """
    return _call(input, dim)


def _check_range(input: Tensor, dim: int) -> None:
    if input.dim() == 0:
        raise IndexError("ncrelu: input must have at least one dimension, got a scalar")
    if not -input.dim() <= dim < input.dim():
        raise IndexError(
            f"ncrelu: dim {dim} is out of range for an input of {input.dim()} dimensions; "
            f"allowed are [{-input.dim()}, {input.dim() - 1}]"
        )


_call = public(ncrelu, _ncrelu, check_values=_check_range)


class NCReLU(nn.Module):
    """Apply :func:`ncrelu`: [N, C, ...] in, [N, 2C, ...] out.

    Args:
        dim: the channel dimension.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        check.integer("NCReLU", "dim", dim)
        self.dim = dim

    def forward(self, input: Tensor) -> Tensor:
        """Return ncrelu(input, dim)."""
        return ncrelu(input, self.dim)

    def extra_repr(self) -> str:
        """Show the channel dimension."""
        return f"dim={self.dim}"


def _fake(input: Tensor, dim: int, op: str = "ncrelu") -> Tensor:
    check.argument(op, "dim", -input.dim() <= dim < input.dim())
    shape = list(input.shape)
    shape[dim] *= 2
    return layout.empty(input, shape, layout.is_channels_last(input))


def _sign_bytes(elements: Any) -> Any:
    return (elements + 3) // 4  # two bits per element


def _fake_with_signs(input: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    signs = input.new_empty((_sign_bytes(input.numel()),), dtype=torch.uint8)
    return _fake(input, dim, "ncrelu_with_signs"), signs


def _fake_backward(grad_output: Tensor, signs: Tensor, dim: int, channels_last: bool) -> Tensor:
    op = "ncrelu_with_signs_backward"
    shape = list(grad_output.shape)
    check.argument(op, "grad_output", shape[dim] % 2 == 0)
    check.argument(op, "channels_last", not channels_last or len(shape) in (4, 5))
    check.same(op, "signs", signs, [_sign_bytes(grad_output.numel() // 2)], torch.uint8)
    shape[dim] //= 2
    return layout.empty(grad_output, shape, channels_last)


def _split_by_signs(grad: Tensor, signs: Tensor, dim: int, channels_last: bool) -> Tensor:
    """Split by the sign of the input: the gradient of ones (positive) and −1 (negative part)."""
    one = torch.ones_like(grad)
    sign = _with_signs_backward(torch.cat((one, -one), dim), signs, dim, channels_last)
    return torch.cat((torch.where(sign > 0, grad, 0), torch.where(sign < 0, grad, 0)), dim)


def _vmap(info: Any, in_dims: Dims, input: Tensor, dim: int) -> tuple[Tensor, int]:
    (x,) = batch_first(info, in_dims[:1], input)
    return _ncrelu(x, dim + 1 if dim >= 0 else dim), 0


def _compose(input: Tensor, dim: int) -> Tensor:
    """Compute the output with operators whose gradient at 0 is 0; negative halves may be −0."""
    return torch.cat((F.relu(input), -F.relu(-input)), dim)


_derivatives = derivatives_of(_compose)


def _sharding(x: Any, dim: int) -> Strategies:
    return [((d,), (d,)) for d in (None, *range(x.ndim)) if d != dim % x.ndim]


def _sharding_backward(grad: Any, signs: Any, *_: Any) -> Strategies:
    """Keep the placement of the signs: each process has padded its own to whole bytes."""
    strategies: Strategies = [((0,), (0, 0)), ((None,), (None, None))]
    return without_redistribution("ncrelu: signs", strategies, signs)


# Autograd runs ncrelu_with_signs, which saves two bits per element. torch.func and forward mode run
# ncrelu, which saves its input: they differentiate repeatedly and map over saved tensors.
register(
    _with_signs,
    fake=_fake_with_signs,
    backward=_with_signs_backward,
    jvp=_derivatives["jvp"],
    vmap=partial(loop_over_samples, _with_signs),
    sharding=[((0, 0), (0,))],
)
register(
    _ncrelu,
    fake=_fake,
    **_derivatives,
    vmap=_vmap,
    sharding=_sharding,
    autograd_variant=_with_signs,
    decomposition=lambda x, dim: torch.cat((x.clamp(min=0), x.clamp(max=0)), dim),
)
register(
    _with_signs_backward,
    **linear(_with_signs_backward, _split_by_signs),
    fake=_fake_backward,
    vmap=partial(loop_over_samples, _with_signs_backward),
    sharding=_sharding_backward,
)
