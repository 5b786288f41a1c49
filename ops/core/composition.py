"""Derivatives of operators that have a composition of PyTorch operators.

Double backward and forward mode run the composition: they are rare, and need no kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from ops.core.gradient import Optionals, as_tuple
from ops.core.torch_private import enable_inplace_requires_grad, make_dual, unpack_dual

Parts = dict[str, Any]  # arguments of registration.register


def derivatives_of(compose: Callable[..., Any]) -> Parts:
    """Return gradient and jvp of an operator whose leading outputs are compose(*args)."""

    def backward(
        args: Sequence[Any], grads: Optionals, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        variables = _where(needed, args)
        results, pullback, *_ = vjp(
            lambda *values: as_tuple(compose(*_fill(variables, values, args))),
            *_present(variables),
        )
        found = pullback(_zeros_for_none(grads, results))
        return tuple(_fill(variables, found, [None] * len(args)))

    def jvp(args: Sequence[Any], outputs: Sequence[Tensor], tangents: Optionals) -> tuple[Any, ...]:
        results = as_tuple(compose(*map(_dual, args, tangents)))
        return *[unpack_dual(y).tangent for y in results], *[None] * (len(outputs) - len(results))

    return {"backward": backward, "jvp": jvp}


def composed(
    compose: Callable[..., Any], inputs: int, outputs: int, constants: int = 0
) -> tuple[Parts, Parts]:
    """Return derivatives of an operator and of its backward operator, as `register` takes them.

    Args:
        compose: f(*inputs, *constants), the differentiable outputs by PyTorch's operators.
        inputs: number of leading arguments that are tensors or None.
        outputs: number of leading outputs that are differentiable.
        constants: number of arguments that follow and are not tensors.

    The backward operator takes `outputs` gradients, the inputs, saved tensors, the constants and
    the mask of gradients to compute.
    """
    end = outputs + inputs
    rest = slice(-1 - constants, -1)  # of the backward operator: the constants

    def compose_outputs(*args: Any) -> Any:
        return compose(*args[: inputs + constants])

    def compose_gradients(*args: Any) -> tuple[Tensor | None, ...]:
        xs = args[outputs:end]
        leaves = _where(args[-1], xs)
        results, pullback, *_ = vjp(
            lambda *values: as_tuple(compose(*_fill(leaves, values, xs), *args[rest])),
            *_present(leaves),
        )
        none = xs[0].new_empty(0)
        return tuple(
            _fill(leaves, pullback(_zeros_for_none(args[:outputs], results)), [none] * inputs)
        )

    def backward_jvp(
        args: Sequence[Any], results: Sequence[Tensor], tangents: Optionals
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad(), enable_inplace_requires_grad(True):
            leaves = [  # of this level; detach() would disconnect outer transforms
                x if x is None or x.requires_grad else x.view_as(x).requires_grad_()
                for x in args[outputs:end]
            ]
            duals = list(map(_dual, leaves, tangents[outputs:end]))
            values = as_tuple(compose(*duals, *args[rest]))
            grads = map(_dual, args[:outputs], tangents[:outputs])
            given = [(y, g) for y, g in zip(values, grads, strict=True) if g is not None]
            needed = [i for i, wanted in enumerate(args[-1]) if wanted and duals[i] is not None]
            computed = torch.autograd.grad(
                [y for y, _ in given],
                [duals[i] for i in needed],
                [g for _, g in given],
                create_graph=True,
            )
        output_tangents = list(map(torch.zeros_like, results))
        for i, grad in zip(needed, computed, strict=True):
            tangent = unpack_dual(grad).tangent
            output_tangents[i] = output_tangents[i] if tangent is None else tangent
        return tuple(output_tangents)

    first = {"jvp": derivatives_of(compose_outputs)["jvp"]}
    return first, derivatives_of(compose_gradients) | {"jvp": backward_jvp}


def _zeros_for_none(grads: Optionals, likes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros_like(like) if grad is None else grad
        for grad, like in zip(grads, likes, strict=True)
    )


def _present(tensors: Optionals) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _where(mask: Sequence[bool], tensors: Optionals) -> list[Tensor | None]:
    return [x if chosen else None for x, chosen in zip(tensors, mask, strict=True)]


def _fill(slots: Optionals, values: Sequence[Tensor], others: Optionals) -> list[Tensor | None]:
    """Return `values`, in order, where `slots` has a tensor, and `others` elsewhere."""
    rest = iter(values)
    return [x if slot is None else next(rest) for slot, x in zip(slots, others, strict=True)]


def _dual(x: Any, tangent: Tensor | None) -> Any:
    return x if tangent is None else make_dual(x, tangent)
