"""Argument checks of public functions and of fakes."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (int, torch.SymInt, Integral)  # Integral: NumPy integers


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without "torch."."""
    return str(dtype).removeprefix("torch.")


def tensor(op: str, name: str, value: object) -> None:
    """Check that `value` is a strided tensor of a supported floating dtype.

    Raises:
        TypeError: not a tensor.
        NotImplementedError: sparse, nested, or not float64, float32, bfloat16 or float16.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be Tensor, not {type(value).__name__}")
    strided(op, name, value)
    if value.dtype not in FLOATING:
        raise NotImplementedError(
            f"{op}: not implemented for dtype {dtype_name(value.dtype)} of {name}; "
            f"allowed are {', '.join(map(dtype_name, FLOATING))}"
        )


def strided(op: str, name: str, x: Tensor) -> None:
    """Raise NotImplementedError for a sparse or nested tensor."""
    if x.layout != torch.strided or x.is_nested:
        given = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise NotImplementedError(f"{op}: {name} must be strided, got {given}")


def batched(op: str, name: str, x: Any, shape: str) -> bool:
    """Check floating `x` of a `shape` like "[N, C, T]", or without N; return whether it has N.

    Raises:
        TypeError: not a tensor.
        NotImplementedError: another layout or dtype.
        RuntimeError: another number of dimensions.
    """
    tensor(op, name, x)
    rank = shape.count(",") + 1
    if x.dim() not in (rank - 1, rank):
        unbatched = shape.replace("N, ", "")
        raise RuntimeError(
            f"{op}: {name} must have shape {shape} or {unbatched}, got {list(x.shape)}"
        )
    return bool(x.dim() == rank)


def is_int(value: object) -> bool:
    """Return whether `value` is a Python, NumPy or symbolic integer (not a bool)."""
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def integer(op: str, name: str, value: Any) -> int:
    """Return `value` as int (torch takes no NumPy integers); raise TypeError if it is none."""
    if type(value) is int:
        return value
    if not is_int(value):
        raise TypeError(f"{op}: {name} must be int, not {type(value).__name__}")
    return int(value)


def number(op: str, name: str, value: Any) -> Any:
    """Return `value`; raise TypeError unless it is a real number."""
    if not isinstance(value, (Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be float, not {type(value).__name__}")
    return value


def positive(op: str, **values: Any) -> None:
    """Raise TypeError unless each value is an int, ValueError unless it is at least 1."""
    for name, value in values.items():
        integer(op, name, value)
        if value < 1:
            raise ValueError(f"{op}: {name} must be at least 1, got {value}")


def boolean(op: str, name: str, value: Any) -> bool:
    """Return `value`; raise TypeError unless it is a bool: a misplaced dtype would be truthy."""
    if not isinstance(value, bool):
        kind = type(value)
        given = kind.__name__ if kind.__name__ != "bool" else f"{kind.__module__}.bool"  # numpy's
        raise TypeError(f"{op}: {name} must be bool, not {given}")
    return value


def activation(op: str, value: Any, allowed: Sequence[str]) -> str:
    """Return an activation's name, "identity" for None.

    Raises:
        TypeError: neither None nor a string.
        ValueError: a name that is not in `allowed`.
    """
    name = "identity" if value is None else value
    if not isinstance(name, str) or name not in allowed:
        kind = ValueError if isinstance(name, str) else TypeError
        names = ", ".join(f'"{item}"' for item in allowed if item != "identity")
        raise kind(f"{op}: activation must be one of None, {names}, got {value!r}")
    return name


def argument(op: str, name: str, valid: Any) -> None:
    """Raise RuntimeError in a fake unless an argument is valid; kernels say what is allowed."""
    torch._check(valid, lambda: f"{op}: invalid {name}")


def same(op: str, name: str, x: Tensor, shape: Sequence[Any], dtype: torch.dtype) -> None:
    """Raise RuntimeError unless the fake `x` has this shape and dtype."""
    argument(op, name, tuple(x.shape) == tuple(shape) and x.dtype == dtype)
