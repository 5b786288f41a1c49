"""DTensor: sharding strategies of the operators.

A strategy shards a call by samples (parameters are replicated, their gradients partial sums) or by
channels, or replicates all tensors. PyTorch redistributes the arguments to the cheapest one.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ops.core.torch_private import OpOverload, register_sharding_strategy, schema_of

# For each tensor the sharded dimension, "sum" (a partial sum in each process) or None (replicated).
Dims = tuple[int | str | None, ...]
Strategies = list[tuple[Dims, Dims]]  # pairs (outputs, tensor arguments)

_state = {"registered": False}


def register_strategies(args: tuple[Any, ...]) -> bool:
    """Register all strategies if a DTensor is among `args`; return whether this call did."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import
    if _state["registered"] or not module or not any(isinstance(x, module.DTensor) for x in args):
        return False
    _state["registered"] = True
    for name, strategies in _STRATEGIES.items():
        op: OpOverload = getattr(torch.ops.lenet_ops, name).default
        register_sharding_strategy(op, partial(_placements, op, strategies))
    return True


def _placements(op: OpOverload, strategies: Any, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the strategies of a call as DTensor's placements; other arguments have none."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(dim: int | str | None) -> Any:
        if isinstance(dim, int):
            return Shard(dim)
        return Partial() if dim == "sum" else Replicate()

    found = []
    for outputs, inputs in strategies(*args) if callable(strategies) else strategies:
        rest = iter(inputs)
        kinds = [str(argument.type) for argument in schema_of(op).arguments]
        dims = [next(rest) if "Tensor" in kind else None for kind in kinds]
        given = [
            placement(dim) if "Tensor" in kind and value is not None else None
            for dim, kind, value in zip(dims, kinds, args, strict=True)
        ]
        found.append(([placement(dim) for dim in outputs], given))
    return found


def _with_replicated(strategies: Strategies) -> Strategies:
    outputs, inputs = strategies[0]
    return [*strategies, ((None,) * len(outputs), (None,) * len(inputs))]


def _elementwise(tensors: int) -> Callable[..., Strategies]:
    def strategies(x: Any, *_: Any) -> Strategies:
        return _with_replicated([((dim,), (dim,) * tensors) for dim in range(x.ndim)])

    return strategies


def _ncrelu(x: Any, dim: int) -> Strategies:
    others = [other for other in range(x.ndim) if other != dim % x.ndim]
    return _with_replicated([((other,), (other,)) for other in others] or [((None,), (None,))])


def _batch_norm(
    x: Any, weight: Any, bias: Any, activation: int, eps: float, mean: Any, var: Any, *_: Any
) -> Strategies:
    """Shard channels only: the statistics reduce over samples.

    Running statistics are updated in place, so they are never redistributed.
    """
    channels: tuple[Dims, Dims] = ((1, 0, 0), (1, 0, 0, 0, 0))
    names = "batch_norm_act2d: running_mean and running_var"
    return _as_placed(names, _with_replicated([channels]), mean, var)


def _ncrelu_backward(grad: Any, signs: Any, *_: Any) -> Strategies:
    """Keep the placement of the signs: each process has padded its own to whole bytes."""
    samples: tuple[Dims, Dims] = ((0,), (0, 0))
    return _as_placed("ncrelu: signs", _with_replicated([samples]), signs)


def _as_placed(names: str, strategies: Strategies, *fixed: Any) -> Strategies:
    """Return the strategies that do not redistribute `fixed`: the sharded or the replicated one."""
    placed = {placement for x in fixed if x is not None for placement in x.placements}
    if not placed:
        return strategies
    if all(placement.is_shard(0) for placement in placed):
        return strategies[:1]
    if all(placement.is_replicate() for placement in placed):
        return strategies[1:]
    raise RuntimeError(f"{names} must be replicated, or sharded along dimension 0, in all meshes")


def _involution(outputs: int) -> Callable[..., Strategies]:
    def strategies(*args: Any) -> Strategies:
        weight = args[outputs]  # argument 1 of the forward pass, 2 of the backward pass
        mesh, tensors = weight.mesh, outputs + 1
        samples: tuple[Dims, Dims] = ((0,) * outputs, (0,) * tensors)
        groups: tuple[Dims, Dims] = ((1,) * outputs, (1,) * tensors)
        even = all(weight.shape[1] % mesh.size(i) == 0 for i in range(mesh.ndim))
        return _with_replicated([samples, groups] if even else [samples])

    return strategies


_IMAGES = _with_replicated([((0,), (0,)), ((1,), (1,))])
_STRATEGIES: dict[str, Strategies | Callable[..., Strategies]] = {
    "exp": _elementwise(1),
    "exp_backward": _elementwise(2),
    "gelu": _elementwise(1),
    "gelu_backward": _elementwise(2),
    "ncrelu": _ncrelu,
    "ncrelu_with_signs": _with_replicated([((0, 0), (0,))]),
    "ncrelu_with_signs_backward": _ncrelu_backward,
    "global_avg_pool2d": _IMAGES,
    "global_avg_pool2d_backward": _IMAGES,
    "max_pool2d": _with_replicated([((0, 0), (0,)), ((1, 1), (1,))]),
    "max_pool2d_backward": _with_replicated([((0,), (0, 0)), ((1,), (1, 1))]),
    "batch_norm_act2d": _batch_norm,
    "batch_norm_act2d_backward": _with_replicated([((1, 0, 0), (1, 1, 0, 0, 0, 0))]),
    "depthwise_conv1d": _with_replicated([((0,), (0, None, None)), ((1,), (1, 0, 0))]),
    "depthwise_conv1d_backward": _with_replicated(
        [((0, "sum", "sum"), (0, 0, None, None)), ((1, 0, 0), (1, 1, 0, 0))]
    ),
    "depthwise_conv2d": _with_replicated([((0,), (0, None, None)), ((1,), (1, 0, 0))]),
    "depthwise_conv2d_backward": _with_replicated(
        [((0, "sum", "sum"), (0, 0, None)), ((1, 0, 0), (1, 1, 0))]
    ),
    "involution2d": _involution(1),
    "involution2d_backward": _involution(2),
    "lltm": _with_replicated([((1, 0, 0, 1), (1, None, None, 0, 0))]),
    "lltm_backward": _with_replicated(
        [((1, "sum", "sum", 0, 0), (1, 0, 0, 1, None, None, 0, 0, 1, 1))]
    ),
}
