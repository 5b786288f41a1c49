"""What PyTorch must know of the LLTM's operators: fakes, gradients, autocast, vmap."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.autograd import forward_ad
from torch.func import vjp

from ops.core import library

cell = torch.ops.lenet_ops.lltm_cell.default
cell_backward = torch.ops.lenet_ops.lltm_cell_backward.default
sequence_loop = torch.ops.lenet_ops.lltm.default
sequence_loop_backward = torch.ops.lenet_ops.lltm_backward.default

State = tuple[Tensor, Tensor]

CELL = ("input", "weights", "bias", "old_h", "old_cell")
SEQUENCE = ("sequence", "weights", "bias", "h0", "c0")


def _fake_forward(
    op: str, names: tuple[str, ...], dim: int, *tensors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments as the kernels do; returns h of every step, a cell and the products."""
    input, _, _, h, _ = tensors
    assert input is not None and h is not None
    shape = "[T, N, I]" if dim == 3 else "[N, I]"
    given = list(input.shape)
    torch._check(
        input.dim() == dim, lambda: f"{op}: {names[0]} must have shape {shape}, got {given}"
    )
    torch._check(
        dim == 2 or given[0] > 0,
        lambda: f"{op}: {names[0]} must have at least one step, got {given}",
    )
    torch._check(
        h.dim() == 2, lambda: f"{op}: {names[3]} must have shape [N, S], got {list(h.shape)}"
    )
    *steps, batch, columns = input.shape
    state = h.shape[1]
    shapes = ((3 * state, state + columns), (3 * state,), (batch, state), (batch, state))
    for name, x, expected in zip(names[1:], tensors[1:], shapes, strict=True):
        if x is not None:
            library.check_fake(op, name, x, expected, names[0], input)
    sums = torch.float64 if input.dtype == torch.float64 else torch.float32
    return (
        input.new_empty((*steps, batch, state)),
        input.new_empty((batch, state)),
        input.new_empty((*steps, batch, 3 * state), dtype=sums),
    )


def _check_like_outputs(op: str, **pairs: tuple[Tensor | None, Tensor]) -> None:
    """Checks gradients of outputs, and saved outputs, against outputs."""
    for name, (x, output) in pairs.items():
        if x is not None:
            library.check_fake(op, name, x, output.shape, "its output", output)


def _fake_gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """Gradients like the five tensors, or empty ones."""
    return tuple(
        tensors[0].new_empty(x.shape if needed and x is not None else [0])
        for x, needed in zip(tensors, mask, strict=True)
    )


@library.register_fake(cell)
def _(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_forward("lltm_cell", CELL, 2, *tensors)


@library.register_fake(cell_backward)
def _(grad_h: Tensor | None, grad_cell: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *tensors, products, mask = args
    op = "lltm_cell_backward"
    h, c, sums = _fake_forward(op, CELL, 2, *tensors)
    _check_like_outputs(op, grad_h=(grad_h, h), grad_cell=(grad_cell, c), products=(products, sums))
    return _fake_gradients(tensors, mask)


@library.register_fake(sequence_loop)
def _(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, cell, products = _fake_forward("lltm", SEQUENCE, 3, *tensors)
    return output, torch.empty_like(cell), cell, products


@library.register_fake(sequence_loop_backward)
def _(
    grad_output: Tensor | None, grad_h: Tensor | None, grad_cell: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    *tensors, output, products, mask = args
    op = "lltm_backward"
    steps, last, sums = _fake_forward(op, SEQUENCE, 3, *tensors)
    _check_like_outputs(
        op,
        grad_output=(grad_output, steps),
        grad_h=(grad_h, last),
        grad_cell=(grad_cell, last),
        output=(output, steps),
        products=(products, sums),
    )
    return _fake_gradients(tensors, mask)


def _setup_cell(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    products = output[-1]
    ctx.save_for_backward(*inputs, products)
    ctx.mark_non_differentiable(products)
    ctx.set_materialize_grads(False)


def _setup_sequence(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, *_, products = output
    ctx.save_for_backward(*inputs, h, products)
    ctx.mark_non_differentiable(products)
    ctx.set_materialize_grads(False)


def _gradients(
    op: torch._ops.OpOverload, ctx: Any, saved: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    mask = ctx.needs_input_grad
    computed = op(*grads, *saved, mask)
    return tuple(grad if needed else None for grad, needed in zip(computed, mask, strict=True))


def _cell_gradients(ctx: Any, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
    return _gradients(cell_backward, ctx, saved, grads[:2])


def _sequence_gradients(ctx: Any, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
    return _gradients(sequence_loop_backward, ctx, saved, grads[:3])


# Second derivatives: the gradient of the first ones, of the same in PyTorch's operators.


def _compose_cell(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> State:
    gates = F.linear(torch.cat((old_h, input), 1), weights, bias)
    input_gate, output_gate, candidate = gates.chunk(3, 1)
    new_cell = old_cell + F.elu(candidate) * input_gate.sigmoid()
    return new_cell.tanh() * output_gate.sigmoid(), new_cell


def _compose_sequence(
    sequence: Tensor, weights: Tensor, bias: Tensor | None, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    outputs: list[Tensor] = []
    for input in sequence.unbind():
        h, c = _compose_cell(input, weights, bias, h, c)
        outputs.append(h)
    return torch.stack(outputs), h, c


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.mask = inputs
    ctx.save_for_backward(*tensors)


def _cell_second_gradients(
    ctx: Any, saved: tuple[Any, ...], *grads: Tensor
) -> tuple[Tensor | None, ...]:
    return *_second_gradients(_compose_cell, 2, ctx, saved, grads), None, None


def _sequence_second_gradients(
    ctx: Any, saved: tuple[Any, ...], *grads: Tensor
) -> tuple[Tensor | None, ...]:
    return *_second_gradients(_compose_sequence, 3, ctx, saved, grads), None, None, None


def _second_gradients(
    compose: Callable[..., tuple[Tensor, ...]],
    outputs: int,
    ctx: Any,
    saved: tuple[Any, ...],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Returns a gradient a tensor: the gradients of `outputs` outputs, and the inputs."""
    tensors = saved[: outputs + 5]
    asked = _where(ctx.needs_input_grad[: outputs + 5], tensors)

    def first(*values: Tensor) -> tuple[Tensor, ...]:
        given = _fill(asked, values, tensors)
        inputs = given[outputs:]
        wanted = _where(ctx.mask, inputs)
        result, pull, *_ = vjp(lambda *xs: compose(*_fill(wanted, xs, inputs)), *_present(wanted))
        return pull(
            tuple(
                torch.zeros_like(y) if grad is None else grad
                for y, grad in zip(result, given[:outputs], strict=True)
            )
        )

    _, pull, *_ = vjp(first, *_present(asked))
    weights = (
        torch.zeros_like(x) if grad is None else grad
        for grad, x in zip(grads, _where(ctx.mask, tensors[outputs:]), strict=True)
        if x is not None
    )
    return _fill(asked, pull(tuple(weights)), [None] * len(asked))


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _where(mask: Sequence[bool], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x if chosen else None for x, chosen in zip(tensors, mask, strict=True)]


def _fill(
    places: Sequence[Tensor | None], values: Sequence[Tensor], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns `values` in the places of the tensors that are there, and `others` elsewhere."""
    rest = iter(values)
    return [x if place is None else next(rest) for place, x in zip(places, others, strict=True)]


# Forward mode: the same in PyTorch's operators, on dual numbers.


def _jvp(compose: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Any, ...]]:
    def jvp(inputs: Sequence[Any], _: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
        outputs = compose(*map(_dual, inputs, tangents))
        return *(forward_ad.unpack_dual(y).tangent for y in outputs), None  # None: the products

    return jvp


def _jvp_backward(
    compose: Callable[..., tuple[Tensor, ...]], outputs: int
) -> Callable[..., tuple[Tensor, ...]]:
    def jvp(
        inputs: Sequence[Any], results: Sequence[Tensor], tangents: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        end = outputs + 5
        with torch.enable_grad(), enable_inplace_requires_grad(True):
            leaves = [  # of this level: to detach would cut them off from transforms outside
                x if x is None or x.requires_grad else x.view_as(x).requires_grad_()
                for x in inputs[outputs:end]
            ]
            duals = list(map(_dual, leaves, tangents[outputs:end]))
            grads = map(_dual, inputs[:outputs], tangents[:outputs])
            given = [(y, g) for y, g in zip(compose(*duals), grads, strict=True) if g is not None]
            needed = [i for i, wanted in enumerate(inputs[-1]) if wanted]
            computed = torch.autograd.grad(
                [y for y, _ in given],
                [duals[i] for i in needed],
                [g for _, g in given],
                create_graph=True,
            )
        moved = list(map(torch.zeros_like, results))
        for i, grad in zip(needed, computed, strict=True):
            tangent = forward_ad.unpack_dual(grad).tangent
            moved[i] = moved[i] if tangent is None else tangent
        return tuple(moved)

    return jvp


def _dual(x: Tensor, tangent: Tensor | None) -> Tensor:
    return x if tangent is None else forward_ad.make_dual(x, tangent)


# vmap: samples that share their parameters are a larger batch, others are computed one by one.


def _vmap(
    op: torch._ops.OpOverload,
    batch_dims: Sequence[int | None],
    out_dims: Sequence[int | None],
    mask: bool = False,
) -> Callable[..., Any]:
    """Makes a rule for vmap.

    Args:
        op: the operator.
        batch_dims: which dimension of each tensor is the batch; None: it has none, a parameter.
        out_dims: the same of the outputs.
        mask: whether a mask of the gradients that are wanted follows the tensors.
    """
    parameters = [i for i, dim in enumerate(batch_dims) if dim is None]

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        wanted = args[-1] if mask else [True] * len(out_dims)
        sums = any(dim is None and needed for dim, needed in zip(out_dims, wanted, strict=True))
        if sums or any(in_dims[i] is not None for i in parameters):
            return library.one_by_one(op, info, in_dims, *args)
        folded = list(args)
        for i, dim in enumerate(batch_dims):
            if dim is not None and args[i] is not None:
                (x,) = library.batch_first(info, in_dims[i : i + 1], args[i])
                folded[i] = x.movedim(0, dim).flatten(dim, dim + 1)
        outputs, dims = [], []
        for y, dim, needed in zip(op(*folded), out_dims, wanted, strict=True):
            if needed and dim is not None:
                y = y.unflatten(dim, (info.batch_size, y.shape[dim] // info.batch_size))
                dims.append(dim)
            else:
                y = y.expand(info.batch_size, 0)
                dims.append(0)
            outputs.append(y)
        return tuple(outputs), tuple(dims)

    return rule


library.register_autocast(cell, "cpu")  # to the region's dtype, as lstm_cell does
library.register_autocast(cell, "cuda")
library.register_autocast(sequence_loop, "cpu")
library.register_autocast(sequence_loop, "cuda")

library.register_autograd(
    cell,
    _setup_cell,
    _cell_gradients,
    _jvp(_compose_cell),
    _vmap(cell, (0, None, None, 0, 0), (0, 0, 0)),
)
library.register_autograd(
    cell_backward,
    _setup_backward,
    _cell_second_gradients,
    _jvp_backward(_compose_cell, 2),
    _vmap(cell_backward, (0, 0, 0, None, None, 0, 0, 0), (0, None, None, 0, 0), mask=True),
    differentiates=True,
)
library.register_autograd(
    sequence_loop,
    _setup_sequence,
    _sequence_gradients,
    _jvp(_compose_sequence),
    _vmap(sequence_loop, (1, None, None, 0, 0), (1, 0, 0, 1)),
)
library.register_autograd(
    sequence_loop_backward,
    _setup_backward,
    _sequence_second_gradients,
    _jvp_backward(_compose_sequence, 3),
    _vmap(
        sequence_loop_backward,
        (1, 0, 0, 1, None, None, 0, 0, 1, 1),
        (1, None, None, 0, 0),
        mask=True,
    ),
    differentiates=True,
)
