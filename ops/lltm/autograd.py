"""Registration of the LLTM's operators: fakes, derivatives, vmap, FLOP formulas."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.core import check, layout
from ops.core.composition import composed
from ops.core.registration import REGION, register
from ops.core.rules import folded
from ops.core.torch_private import OpOverload, name_of, schema_of

cell = torch.ops.lenet_ops.lltm_cell.default
cell_backward = torch.ops.lenet_ops.lltm_cell_backward.default
sequence_loop = torch.ops.lenet_ops.lltm.default
sequence_loop_backward = torch.ops.lenet_ops.lltm_backward.default

State = tuple[Tensor, Tensor]


def _names(op: OpOverload) -> list[str]:
    return [argument.name for argument in schema_of(op).arguments]


def _check(op: str, names: Sequence[str], tensors: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments of a fake; return fakes of all h, one c and the products."""
    input, _, _, h, _ = tensors
    dim = 3 if names[0] == "sequence" else 2
    check.argument(op, names[0], input.dim() == dim and (dim == 2 or input.shape[0] > 0))
    check.argument(op, names[3], h.dim() == 2)
    *steps, batch, columns = input.shape
    state = h.shape[1]
    shapes = ((3 * state, state + columns), (3 * state,), (batch, state), (batch, state))
    for name, x, expected in zip(names[1:], tensors[1:], shapes, strict=True):
        if x is not None:
            check.same(op, name, x, expected, input.dtype)
    return (
        input.new_empty((*steps, batch, state)),
        input.new_empty((batch, state)),
        input.new_empty((*steps, batch, 3 * state), dtype=_sum_dtype(input)),
    )


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake_cell(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _check("lltm_cell", _names(cell), tensors)


def _fake_sequence(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, c, products = _check("lltm", _names(sequence_loop), tensors)
    return output, torch.empty_like(c), c, products


def _fake_backward(op: OpOverload, forward: OpOverload, *args: Any) -> tuple[Tensor, ...]:
    """Return fake gradients of the five tensors, of shape [0] if not needed."""
    given = dict(zip(_names(op), args, strict=True))
    tensors = [given[name] for name in _names(forward)]
    h, c, products = _check(name_of(op), _names(forward), tensors)
    likes = {"grad_output": h, "output": h, "grad_h": c, "grad_cell": c, "products": products}
    for name, like in likes.items():
        if (x := given.get(name)) is not None:
            check.same(name_of(op), name, x, like.shape, like.dtype)
    grads = [None if x is None else layout.gradient_of(x) for x in tensors]
    grads[0] = tensors[0].new_empty(tensors[0].shape)
    return tuple(
        x if needed and x is not None else tensors[0].new_empty([0])
        for x, needed in zip(grads, given["output_mask"], strict=True)
    )


def _flops(input: Sequence[int], weights: Sequence[int], *_: Any, out_shape: Any) -> int:
    """Count the matrix products as torch does: 2 · rows · columns · inner size."""
    return 2 * prod(input[:-1]) * prod(weights)


def _flops_backward(grads: int, *args: Any, out_shape: Any) -> int:
    """Count one product for input and state gradients, and one for the weight gradient.

    `args` has `grads` gradients before input and weights.
    """
    input, weights, mask = args[grads], args[grads + 1], args[-1]
    return (int(mask[0] or mask[3]) + int(mask[1])) * _flops(input, weights, out_shape=None)


def _compose_cell(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    products = F.linear(torch.cat((old_h, input), 1), weights)
    gates = products if bias is None else products + bias
    input_gate, output_gate, candidate = gates.chunk(3, 1)
    new_cell = old_cell + F.elu(candidate) * input_gate.sigmoid()
    return new_cell.tanh() * output_gate.sigmoid(), new_cell, products.to(_sum_dtype(input))


def _compose_sequence(
    sequence: Tensor, weights: Tensor, bias: Tensor | None, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs: list[Tensor] = []
    products: list[Tensor] = []
    for input in sequence.unbind():
        h, c, product = _compose_cell(input, weights, bias, h, c)
        outputs.append(h)
        products.append(product)
    return torch.stack(outputs), h, c, torch.stack(products)


_cell, _cell_backward = composed(_compose_cell, inputs=5, outputs=2)
_loop, _loop_backward = composed(_compose_sequence, inputs=5, outputs=3)

# If samples share the parameters, vmap folds them into the batch.
register(
    cell,
    fake=_fake_cell,
    backward=cell_backward,
    **_cell,
    vmap=folded(cell, (0, None, None, 0, 0), (0, 0, 0)),
    sharding=[((0, 0, 0), (0, None, None, 0, 0))],
    autocast=REGION,  # as lstm_cell
    flops=_flops,
    decomposition=_compose_cell,
)
register(
    cell_backward,
    fake=partial(_fake_backward, cell_backward, cell),
    **_cell_backward,
    vmap=folded(cell_backward, (0, 0, 0, None, None, 0, 0, 0), (0, None, None, 0, 0), mask=True),
    sharding=[((0, "sum", "sum", 0, 0), (0, 0, 0, None, None, 0, 0, 0))],
    flops=partial(_flops_backward, 2),
)
register(
    sequence_loop,
    fake=_fake_sequence,
    backward=sequence_loop_backward,
    **_loop,
    vmap=folded(sequence_loop, (1, None, None, 0, 0), (1, 0, 0, 1)),
    sharding=[((1, 0, 0, 1), (1, None, None, 0, 0))],
    autocast=REGION,
    flops=_flops,
    decomposition=_compose_sequence,
)
register(
    sequence_loop_backward,
    fake=partial(_fake_backward, sequence_loop_backward, sequence_loop),
    **_loop_backward,
    vmap=folded(
        sequence_loop_backward,
        (1, 0, 0, 1, None, None, 0, 0, 1, 1),
        (1, None, None, 0, 0),
        mask=True,
    ),
    sharding=[((1, "sum", "sum", 0, 0), (1, 0, 0, 1, None, None, 0, 0, 1, 1))],
    flops=partial(_flops_backward, 3),
)
