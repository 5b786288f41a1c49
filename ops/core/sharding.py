"""DTensor: sharding strategies of the operators.

A strategy shards a call by samples (parameters are replicated, their gradients partial sums) or by
channels, or replicates all tensors. PyTorch redistributes the arguments to the cheapest one.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ops.core.torch_private import OpOverload, register_sharding_strategy, schema_of

# For each tensor the sharded dimension, "sum" (a partial sum in each process) or None (replicated).
Dims = tuple[int | str | None, ...]
Strategies = Sequence[tuple[Dims, Dims]]  # pairs (outputs, tensor arguments)
# The strategies besides the replicated one; or f(*args), which returns all strategies.
Sharding = Strategies | Callable[..., Strategies]

pending: dict[OpOverload, Sharding] = {}  # not yet registered: PyTorch's module is slow to import


def register_strategies(args: tuple[Any, ...]) -> bool:
    """Register all strategies if a DTensor is among `args`; return whether this call did."""
    module = sys.modules.get("torch.distributed.tensor")
    if not pending or not module or not any(isinstance(x, module.DTensor) for x in args):
        return False
    while pending:
        op, strategies = pending.popitem()
        register_sharding_strategy(op, partial(_placements, op, strategies))
    return True


def _placements(op: OpOverload, strategies: Any, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the strategies of a call as DTensor's placements; other arguments have none."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def placement(dim: int | str | None) -> Any:
        if isinstance(dim, int):
            return Shard(dim)
        return Partial() if dim == "sum" else Replicate()

    tensors = [i for i, x in enumerate(schema_of(op).arguments) if "Tensor" in str(x.type)]
    if callable(strategies):
        all_strategies = strategies(*args)
    else:
        replicated = (None,) * len(schema_of(op).returns), (None,) * len(tensors)
        all_strategies = [*strategies, replicated]
    found = []
    for outputs, inputs in all_strategies:
        dims = dict(zip(tensors, inputs, strict=True))
        given = [
            placement(dims[i]) if i in dims and x is not None else None for i, x in enumerate(args)
        ]
        found.append(([placement(dim) for dim in outputs], given))
    return found


def without_redistribution(names: str, strategies: Strategies, *tensors: Any) -> Strategies:
    """Return the strategies that keep `tensors` as they are.

    Args:
        names: what the error message calls them.
        strategies: one that shards their dimension 0, and one that replicates them.
        tensors: DTensors or None.

    Raises:
        RuntimeError: another placement, or different ones.
    """
    placed = {placement for x in tensors if x is not None for placement in x.placements}
    if not placed:
        return strategies
    if all(placement.is_shard(0) for placement in placed):
        return strategies[:1]
    if all(placement.is_replicate() for placement in placed):
        return strategies[1:]
    raise RuntimeError(f"{names} must be replicated, or sharded along dimension 0, in all meshes")
