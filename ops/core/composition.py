"""Derivatives of operators that have a composition of PyTorch operators.

Double backward and forward mode run the composition: they are rare, and need no kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.core.gradient import Optionals, as_tuple
from ops.core.torch_private import enable_inplace_requires_grad, make_dual, unpack_dual

Parts = dict[str, Any]  # arguments of registration.register


def derivatives_of(compose: Callable[..., Any]) -> Parts:
    """Return gradient and jvp of an operator whose leading outputs are compose(*args)."""

    def backward(
        args: Sequence[Any], grads: Optionals, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        return _gradients(compose, args, grads, needed, torch.is_grad_enabled())

    def jvp(args: Sequence[Any], outputs: Sequence[Tensor], tangents: Optionals) -> tuple[Any, ...]:
        duals = (x if t is None else make_dual(x, t) for x, t in zip(args, tangents, strict=True))
        results = [unpack_dual(y) for y in as_tuple(compose(*duals))]
        found = [torch.zeros_like(y) if t is None else t for y, t in results]
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

    def compose_outputs(*args: Any) -> tuple[Tensor, ...]:
        return as_tuple(compose(*args[: inputs + constants]))[:outputs]

    def compose_gradients(*args: Any) -> tuple[Tensor, ...]:
        grads, rest, mask = args[:outputs], args[-1 - constants : -1], args[-1]
        xs = args[outputs : outputs + inputs]
        found = _gradients(lambda *xs: compose_outputs(*xs, *rest), xs, grads, mask, True)
        return tuple(xs[0].new_empty(0) if grad is None else grad for grad in found)

    return {"jvp": derivatives_of(compose_outputs)["jvp"]}, derivatives_of(compose_gradients)


def _gradients(
    function: Callable[..., Any],
    args: Sequence[Any],
    grads: Optionals,
    needed: Sequence[bool],
    create_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients of function(*args) with respect to the `needed` tensors."""
    inputs = list(args)
    chosen = [i for i, x in enumerate(args) if needed[i] and x is not None]
    with torch.enable_grad(), enable_inplace_requires_grad(True):
        for i in chosen:  # detach() would disconnect outer transforms
            x = inputs[i] = args[i].view_as(args[i])
            if not x.requires_grad:
                x.requires_grad_()
        pairs = zip(as_tuple(function(*inputs)), grads, strict=True)
        results = [(y, grad) for y, grad in pairs if grad is not None and y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in results],
            [inputs[i] for i in chosen],
            [grad for _, grad in results],
            create_graph=create_graph,
            materialize_grads=True,
        )
    gradients: list[Tensor | None] = [None] * len(args)
    for i, gradient in zip(chosen, found, strict=True):
        gradients[i] = gradient
    return gradients
