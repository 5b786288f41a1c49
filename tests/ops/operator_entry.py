"""The classes of the operator table in entries/."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

raw = torch.ops.lenet_ops  # without the argument checks of the Python functions
Shape = tuple[int, ...]


def pairs(*values: int | tuple[int, int]) -> list[tuple[int, int]]:
    """Return each int or pair as (vertical, horizontal)."""
    return [v if isinstance(v, tuple) else (v, v) for v in values]


@dataclass(frozen=True)
class Case:
    """A call: the shapes of its tensors (None: no tensor) and its other arguments."""

    shapes: tuple[Shape | None, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ["x".join(map(str, s)) if s is not None else "None" for s in self.shapes]
        return " ".join([*sizes, *(f"{k}={v}" for k, v in self.kwargs.items())])


@dataclass(frozen=True)
class Wrong:
    """A call that must raise; its message has the parts of `says`, split at ` … `, in order."""

    call: Callable[[], object]
    raises: type[Exception]
    says: str

    @property
    def pattern(self) -> str:
        return ".*".join(re.escape(part) for part in self.says.split(" … "))

    def __str__(self) -> str:
        return self.says.replace("…", "...")


@dataclass(frozen=True)
class Operator:
    """An operator and its module.

    The tensors are the leading arguments, and all are differentiable. The module's input is the
    first tensor (and the state of a recurrent layer, as a tuple); the other tensors are its
    parameters. A module of another kind has a `module_reference`.
    """

    name: str  # in torch.ops.lenet_ops, with <name>_backward
    function: Callable[..., Any]
    reference: Callable[..., Any]  # in PyTorch operators, twice differentiable
    cases: tuple[Case, ...]  # small, for gradcheck; other tests use only the first
    resized: tuple[Shape | None, ...]  # other shapes for the first case: dynamic shapes
    empty: tuple[Case, ...]
    bulk: Case  # large enough for several threads and several CUDA blocks
    huge: Case  # first tensor > 2^31 elements
    # Dtype of the computation: the input's, the region's, or float32 (on CUDA only).
    autocast: Literal["input", "region", "float32"]
    module: Callable[..., nn.Module]  # takes device and dtype; fits the first case
    wrong: tuple[Wrong, ...]
    # Tensors saved for backward; "own" is made by forward for backward only.
    saves: Literal["input", "output", "both", "own", "nothing"] = "input"
    autograd_variant: str | None = None  # with <autograd_variant>_backward
    # Index of a tensor whose CUDA gradient may be NaN if another tensor is not finite.
    nan_gradient: int | None = None
    roundings: int = 1  # to the dtype on the way to a result; 2 if backward reads a rounded output
    largest: float = 1e300  # largest input without overflow in operator and reference
    uses_matmul: bool = False  # PyTorch's products are not bitwise equal across thread counts
    batch_dim: int = 0  # of the first tensor; tensors of lower rank have it first
    state: int = 0  # number of state tensors, the last ones
    module_reference: Callable[[Any, Tensor], Any] | None = None
    peer: Callable[[], nn.Module] | None = None  # torch.nn module with the same parameters
    batch_statistics: bool = False  # a sample's output depends on the other samples
    exported: bool = True  # False: for training only; evaluation runs PyTorch's operators

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Return the operators in torch.ops.lenet_ops."""
        differentiated = self.autograd_variant or self.name
        return tuple({self.name, differentiated, f"{differentiated}_backward"})


# Cases for elementwise operators.
ELEMENTWISE: dict[str, Any] = {
    "cases": (
        Case(((2, 3, 5, 4),)),
        Case(((),)),
        Case(((37,),)),
        Case(((3, 1),)),
        Case(((2, 3, 2, 3, 2),)),
    ),
    "resized": ((3, 3, 6, 5),),
    "empty": (Case(((0,),)), Case(((2, 0, 3, 4),))),
    "bulk": Case(((4, 8, 47, 51),)),
    "huge": Case(((3, 2**30 + 9),)),
}
