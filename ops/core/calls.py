"""Calls of operators by the public functions."""

import importlib
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from ops.core import check, windows
from ops.core.gradient import as_tuple
from ops.core.library import EAGER, has_eager
from ops.core.memory import convert_out_of_memory
from ops.core.sharding import register_strategies
from ops.core.torch_private import OpOverload, name_of, schema_of
from ops.core.tracing import record_call


def public(
    function: Callable[..., Any],
    op: OpOverload,
    *,
    rank: int = 0,
    check_values: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Return f(*args), which a public function calls: it returns the first output of `op`.

    A C function calls the operator (make_caller). Under torch.compile, which cannot trace it, and
    for types and modes that it does not take, Python does. Arguments are checked only after a
    failure, so that a correct call costs no checks in Python.

    Args:
        function: the public function, which is a node of torch.fx graphs.
        op: the operator. It takes the arguments of `function`, in this order.
        rank: rank of the first argument of `op`: 4, an image [N, C, H, W], or 3, a sequence
            [N, C, T]. The function also takes one without N. 0: any rank.
        check_values: f(*args), raises if values of the right types are wrong.
    """
    name = name_of(op)
    kinds = [(x.name, str(x.type)) for x in schema_of(op).arguments]
    converted = [(i, *kind) for i, kind in enumerate(kinds) if kind[1] in _CONVERSIONS]

    def call_op(input: Any, *rest: Any) -> Any:
        if isinstance(input, Proxy):
            return record_call(function, input, *rest)
        values = [input, *rest]
        for i, argument, kind in converted:
            values[i] = _CONVERSIONS[kind](name, argument, values[i])
        if rank == 0 or input.dim() != rank - 1:
            return as_tuple(op(*values))[0]
        return as_tuple(op(input.unsqueeze(0), *values[1:]))[0].squeeze(0)

    def check_arguments(*args: Any) -> None:
        for i, ((argument, kind), value) in enumerate(zip(kinds, args, strict=True)):
            if rank and i == 0:
                check.batched(name, argument, value, _SHAPES[rank])
            elif kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None):
                check.tensor(name, argument, value)
            elif kind in _CONVERSIONS:
                _CONVERSIONS[kind](name, argument, value)
        if check_values is not None:
            check_values(*args)

    call_in_cpp = make_caller(op, call_op, rank=rank)

    def call(*args: Any) -> Any:
        try:
            return (call_op if is_dynamo_compiling() else call_in_cpp)(*args)
        except Exception:
            check_arguments(*args)
            if register_strategies(args):  # the first call with a DTensor
                return call(*args)
            raise

    return call


def make_caller(
    op: OpOverload, fallback: Callable[..., Any], *, rank: int = 0
) -> Callable[..., Any]:
    """Return a C function that calls `op` and returns its first output (eager/call.h).

    It calls `fallback` instead if the type of an argument is not exactly that of the schema, if the
    first argument does not have `rank` dimensions (0: any), or if a mode, transform or trace is
    active. An `int[2]` may be a tuple of two ints, or one int for both. Without the eager library,
    return `fallback` with its out-of-memory errors converted.
    """
    if not has_eager():
        return convert_out_of_memory(fallback, name_of(op))
    eager = importlib.import_module(f"ops.{EAGER}")
    name = op.name().removesuffix(".default")
    caller: Callable[..., Any] = eager.make_caller(name, rank, fallback)
    return caller


_SHAPES = {3: "[N, C, T]", 4: "[N, C, H, W]"}  # by rank

# By type of arguments that are not tensors: f(operator, argument, value), returns the converted
# value or raises TypeError (of another type) or RuntimeError (out of range).
_CONVERSIONS: dict[str, Callable[[str, str, Any], Any]] = {
    "int": check.integer,
    "bool": check.boolean,
    "float": check.number,
    "List[int]": windows.pair,
}
