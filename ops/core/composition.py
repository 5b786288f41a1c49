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
    ) -> list[Tensor | None]:
        return _gradients(compose, args, grads, needed)

    def jvp(args: Sequence[Any], outputs: Sequence[Tensor], tangents: Optionals) -> tuple[Any, ...]:
        found = [unpack_dual(y).tangent for y in as_tuple(compose(*map(_dual, args, tangents)))]
        return *found, *[None] * (len(outputs) - len(found))

    return {"backward": backward, "jvp": jvp}


def composed(
    compose: Callable[..., Any], inputs: int, outputs: int, constants: int = 0
) -> tuple[Parts, Parts]:
    """Return derivatives of an operator and of its backward operator, as `register` takes them.

    Args:
        compose: f(*inputs, *constants), the leading outputs by PyTorch's operators.
        inputs: number of leading arguments that are tensors or None.
        outputs: number of leading outputs that are differentiable.
        constants: number of arguments that follow and are not tensors.

    The backward operator takes `outputs` gradients, the inputs, saved tensors, the constants and
    the mask of gradients to compute.
    """
    end = outputs + inputs

    def compose_outputs(*args: Any) -> tuple[Tensor, ...]:
        return as_tuple(compose(*args[: inputs + constants]))[:outputs]

    def compose_gradients(*args: Any) -> tuple[Tensor, ...]:
        xs, rest = args[outputs:end], args[-1 - constants : -1]
        found = _gradients(lambda *xs: compose_outputs(*xs, *rest), xs, args[:outputs], args[-1])
        return tuple(xs[0].new_empty(0) if grad is None else grad for grad in found)

    def gradients_jvp(
        args: Sequence[Any], results: Sequence[Tensor], tangents: Optionals
    ) -> tuple[Tensor, ...]:
        """Return the tangents of compose_gradients; a jvp may not call torch.func's transforms."""
        with torch.enable_grad(), enable_inplace_requires_grad(True):
            leaves = [  # of this level; detach() would disconnect outer transforms
                x if x is None or x.requires_grad else x.view_as(x).requires_grad_()
                for x in args[outputs:end]
            ]
            xs = list(map(_dual, leaves, tangents[outputs:end]))
            values = compose_outputs(*xs, *args[-1 - constants : -1])
            grads = map(_dual, args[:outputs], tangents[:outputs])
            given = [(y, g) for y, g in zip(values, grads, strict=True) if g is not None]
            chosen = [i for i, x in enumerate(xs) if args[-1][i] and x is not None]
            ys, gs = zip(*given, strict=True)
            found = torch.autograd.grad(ys, [xs[i] for i in chosen], gs, create_graph=True)
        output_tangents = list(map(torch.zeros_like, results))
        for i, grad in zip(chosen, found, strict=True):
            tangent = unpack_dual(grad).tangent
            output_tangents[i] = output_tangents[i] if tangent is None else tangent
        return tuple(output_tangents)

    first = {"jvp": derivatives_of(compose_outputs)["jvp"]}
    return first, derivatives_of(compose_gradients) | {"jvp": gradients_jvp}


def _gradients(
    function: Callable[..., Any], args: Sequence[Any], grads: Optionals, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of function(*args) with respect to the `needed` tensors."""
    chosen = [i for i, x in enumerate(args) if needed[i] and x is not None]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(chosen, values, strict=True))
        return as_tuple(function(*(given.get(i, x) for i, x in enumerate(args))))

    results, pullback, *_ = vjp(call, *(args[i] for i in chosen))
    pairs = zip(results, grads, strict=True)
    found = pullback(tuple(torch.zeros_like(y) if grad is None else grad for y, grad in pairs))
    gradients: list[Tensor | None] = [None] * len(args)
    for i, gradient in zip(chosen, found, strict=True):
        gradients[i] = gradient
    return gradients


def _dual(x: Any, tangent: Tensor | None) -> Any:
    return x if tangent is None else make_dual(x, tangent)
