"""Registration of the LLTM: fakes, derivatives, vmap, FLOP formula."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.core import check, layout, windows
from ops.core.composition import composed
from ops.core.registration import REGION, register
from ops.core.rules import folded

forward = torch.ops.lenet_ops.lltm.default
backward = torch.ops.lenet_ops.lltm_backward.default

State = tuple[Tensor, Tensor]


def _check(
    op: str, sequence: Tensor, weights: Tensor, bias: Tensor | None, h0: Tensor, c0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments of a fake; return fakes of all h, one c and the saved values."""
    check.argument(op, "sequence", sequence.dim() == 3 and sequence.shape[0] > 0)
    check.argument(op, "h0", h0.dim() == 2)
    steps, batch, columns = sequence.shape
    state = h0.shape[1]
    for name, x, expected in (
        ("weights", weights, (3 * state, state + columns)),
        ("bias", bias, (3 * state,)),
        ("h0", h0, (batch, state)),
        ("c0", c0, (batch, state)),
    ):
        if x is not None:
            check.same(op, name, x, expected, sequence.dtype)
    return (
        sequence.new_empty((steps, batch, state)),
        sequence.new_empty((batch, state)),
        sequence.new_empty((steps, batch, 4 * state), dtype=_sum_dtype(sequence)),
    )


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake(*tensors: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, c, saved = _check("lltm", *tensors)
    return output, torch.empty_like(c), c, saved


def _fake_backward(
    grad_output: Tensor | None, grad_h: Tensor | None, grad_cell: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    """Return fake gradients of the five tensors, of shape [0] if not needed."""
    *tensors, output, saved, mask = args
    op, sequence = "lltm_backward", tensors[0]
    all_h, c, values = _check(op, *tensors)
    for name, x, like in (
        ("grad_output", grad_output, all_h),
        ("output", output, all_h),
        ("grad_h", grad_h, c),
        ("grad_cell", grad_cell, c),
        ("saved", saved, values),
    ):
        if x is not None:
            check.same(op, name, x, like.shape, like.dtype)
    grads = [sequence.new_empty(0) if x is None else layout.gradient_of(x) for x in tensors]
    grads[0] = sequence.new_empty(sequence.shape)
    return windows.select(op, mask, *grads)


def _flops(sequence: Sequence[int], weights: Sequence[int], *_: Any, out_shape: Any) -> int:
    """Count the matrix products as torch does: 2 · rows · columns · inner size."""
    return 2 * prod(sequence[:-1]) * prod(weights)


def _flops_backward(*args: Any, out_shape: Any) -> int:
    """Count one product for sequence and state gradients, and one for the weight gradient."""
    sequence, weights, mask = args[3], args[4], args[-1]
    return (int(mask[0] or mask[3]) + int(mask[1])) * _flops(sequence, weights, out_shape=None)


def _compose(
    sequence: Tensor, weights: Tensor, bias: Tensor | None, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, saved = [], []
    for x in sequence.unbind():
        products = F.linear(torch.cat((h, x), 1), weights)
        i, o, z = (products if bias is None else products + bias).chunk(3, 1)
        c = c + F.elu(z) * i.sigmoid()
        h = c.tanh() * o.sigmoid()
        steps.append(h)
        saved.append(torch.cat((products, c), 1))
    return torch.stack(steps), h, c, torch.stack(saved).to(_sum_dtype(sequence))


_derivatives, _second_derivatives = composed(_compose, inputs=5, outputs=3)

# If samples share the parameters, vmap folds them into the batch.
register(
    forward,
    fake=_fake,
    backward=backward,
    **_derivatives,
    vmap=folded(forward, (1, None, None, 0, 0), (1, 0, 0, 1)),
    sharding=[((1, 0, 0, 1), (1, None, None, 0, 0))],
    autocast=REGION,  # as lstm_cell
    flops=_flops,
    decomposition=_compose,
)
register(
    backward,
    fake=_fake_backward,
    **_second_derivatives,
    vmap=folded(backward, (1, 0, 0, 1, None, None, 0, 0, 1, 1), (1, None, None, 0, 0), mask=True),
    sharding=[((1, "sum", "sum", 0, 0), (1, 0, 0, 1, None, None, 0, 0, 1, 1))],
    flops=_flops_backward,
)
