"""Fakes, gradients, jvp and vmap rules that elementwise, linear and batched operators share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.core import check
from ops.core.composition import Parts, derivatives_of
from ops.core.gradient import as_tuple, make_gradient
from ops.core.sharding import Strategies
from ops.core.torch_private import OpOverload, name_of, schema_of

Dims = Sequence[int | None]


def elementwise(
    op: OpOverload, backward_or_composition: OpOverload | Callable[..., Tensor]
) -> Parts:
    """Return fake, gradient, jvp, vmap and sharding of an elementwise operator.

    All its tensors have one shape.

    Args:
        op: the operator.
        backward_or_composition: the backward operator, if `op` has one tensor; or a composition of
            PyTorch operators that computes the same as `op`: derivatives are derived from it.
    """
    names = [argument.name for argument in schema_of(op).arguments]

    def fake(*tensors: Tensor) -> Tensor:
        like = tensors[-1]  # of a backward operator: the saved tensor
        for name, x in zip(names, tensors, strict=True):
            check.same(name_of(op), name, x, like.shape, like.dtype)
        return torch.empty_like(like)

    def vmap(info: Any, in_dims: Dims, *tensors: Tensor) -> tuple[Tensor, int]:
        return op(*batch_first(info, in_dims, *tensors)), 0

    def sharding(like: Any, *_: Any) -> Strategies:
        return [((dim,), (dim,) * len(names)) for dim in (None, *range(like.ndim))]

    parts: Parts = {"fake": fake, "vmap": vmap, "sharding": sharding}
    if not isinstance(backward_or_composition, OpOverload):
        return parts | derivatives_of(backward_or_composition)
    gradient = make_gradient(op, backward_or_composition)

    def jvp(args: Any, outputs: Any, tangents: Any) -> Tensor | None:
        """Call the backward operator: the Jacobian is diagonal, hence its own transpose."""
        return gradient.call(gradient.values(args, outputs), tangents, (True,))[0]

    return parts | {"backward": backward_or_composition, "jvp": jvp}


def linear(op: OpOverload, transpose: OpOverload | Callable[..., Tensor]) -> Parts:
    """Return gradient and jvp of an operator that is linear in its first tensor.

    Args:
        op: the operator. Its other arguments have no derivative.
        transpose: the backward operator, or f(grad, *rest) with the other arguments.
    """

    def jvp(args: Any, outputs: Any, tangents: Any) -> Any:
        return op(tangents[0], *args[1:])

    if isinstance(transpose, OpOverload):
        return {"backward": transpose, "jvp": jvp}

    def backward(args: Any, grads: Any, needed: Any) -> tuple[Tensor]:
        return (transpose(grads[0], *args[1:]),)

    return {"backward": backward, "jvp": jvp}


def folded(
    op: OpOverload, batch_dims: Dims, out_dims: Dims, mask: bool = False
) -> Callable[..., Any]:
    """Return a vmap rule that folds the mapped dimension into an existing dimension.

    Args:
        op: the operator.
        batch_dims: for each tensor, the dimension to fold into; None for a parameter.
        out_dims: for each output, the folded dimension; None for a sum over the batch, such as a
            parameter's gradient.
        mask: whether the last argument is a mask of the outputs to compute.

    The rule calls the operator once per sample if a parameter is mapped or a sum over the batch is
    needed.
    """
    parameters = [i for i, dim in enumerate(batch_dims) if dim is None]

    def rule(info: Any, in_dims: Dims, *args: Any) -> Any:
        needed = args[-1] if mask else [True] * len(out_dims)
        sums = any(dim is None and wanted for dim, wanted in zip(out_dims, needed, strict=True))
        if sums or any(in_dims[i] is not None for i in parameters):
            return loop_over_samples(op, info, in_dims, *args)
        inputs = list(args)
        for i, dim in enumerate(batch_dims):
            if dim is not None and args[i] is not None:
                (x,) = batch_first(info, in_dims[i : i + 1], args[i])
                inputs[i] = x.movedim(0, dim).flatten(dim, dim + 1)
        results = op(*inputs)
        outputs: list[Tensor] = []
        dims: list[int] = []
        for y, dim, wanted in zip(as_tuple(results), out_dims, needed, strict=True):
            if wanted and dim is not None:
                outputs.append(y.unflatten(dim, (info.batch_size, y.shape[dim] // info.batch_size)))
                dims.append(dim)
            else:
                outputs.append(y.expand(info.batch_size, 0))  # not computed: shape [0]
                dims.append(0)
        if isinstance(results, tuple):
            return tuple(outputs), tuple(dims)
        return outputs[0], dims[0]

    return rule


def batch_first(info: Any, in_dims: Dims, *tensors: Tensor) -> list[Tensor]:
    """Move the mapped dimension to the front; expand tensors that are not mapped."""
    return [
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
        for d, x in zip(in_dims, tensors, strict=True)
    ]


def loop_over_samples(op: Callable[..., Any], info: Any, in_dims: Dims, *args: Any) -> Any:
    """Call `op` once per sample and stack the outputs, as a vmap rule."""
    samples = [
        op(
            *(
                x.select(d, i) if isinstance(x, Tensor) and d is not None else x
                for d, x in zip(in_dims, args, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    return outputs, (0,) * len(outputs)


def total(*terms: Tensor | None) -> Tensor | None:
    """Return the sum of the terms that are not None; None if all are None."""
    present = [term for term in terms if term is not None]
    return sum(present[1:], present[0]) if present else None
