"""What the tests need to know of an operator: an entry of the table, a file in entries/."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

raw = torch.ops.lenet_ops  # the operators without the checks of their Python functions
Shape = tuple[int, ...]


def pairs(*values: int | tuple[int, int]) -> list[tuple[int, int]]:
    """Returns arguments that are an int or a pair as (vertical, horizontal)."""
    return [v if isinstance(v, tuple) else (v, v) for v in values]


@dataclass(frozen=True)
class Case:
    """One call: the shapes of its tensors (None: that one is left out) and its other arguments."""

    shapes: tuple[Shape | None, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ["x".join(map(str, s)) if s is not None else "None" for s in self.shapes]
        return " ".join([*sizes, *(f"{k}={v}" for k, v in self.kwargs.items())])


@dataclass(frozen=True)
class Wrong:
    """A call that must raise, and what its message must say beside the operator's name.

    The parts of `says`, separated by an ellipsis, appear in this order.
    """

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
    """An operator of one or several outputs.

    Its tensors are its leading arguments, and all of them are differentiable. The module takes the
    first one, and a recurrent layer's state as a tuple; the others are its parameters, or `applies`
    says what it does instead.
    """

    name: str  # in torch.ops.lenet_ops, beside <name>_backward
    function: Callable[..., Any]
    reference: Callable[..., Any]  # the same in plain torch, differentiable twice
    cases: tuple[Case, ...]  # small (gradcheck walks every element); the first is the typical one
    resized: tuple[Shape | None, ...]  # other shapes for the typical case, for dynamic shapes
    empty: tuple[Case, ...]
    bulk: Case  # large enough for several threads and several CUDA blocks
    huge: Case  # first tensor > 2^31 elements
    autocast: Literal["input", "region", "float32"]  # the dtype it runs in; the last on CUDA only
    module: Callable[..., nn.Module]  # takes device and dtype; fits the typical first tensor
    wrong: tuple[Wrong, ...]
    # For backward; "own" is a tensor that nobody else sees.
    saves: Literal["input", "output", "both", "own", "nothing"] = "input"
    recorded: str | None = None  # what autograd runs in its place, beside <recorded>_backward
    # On CUDA, which tensor's gradient may be NaN where another one is not finite.
    nan_gradient: int | None = None
    roundings: int = 1  # to its dtype, of what reaches a result one after the other
    largest: float = 1e300  # what it, and the float64 reference, hold without overflow inside
    products: bool = False  # made of PyTorch's matrix products, whose bits the threads' number sets
    samples: int = 0  # their dimension in the first tensor; 0 in those of fewer dimensions
    state: int = 0  # how many of its tensors, the last ones, networks compute: they have samples
    applies: Callable[[Any, Tensor], Any] | None = None  # the module's output, from its parts
    peer: Callable[[], nn.Module] | None = None  # the module in torch.nn with the same parameters

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All of it in torch.ops.lenet_ops."""
        forward = [self.name, *([self.recorded] if self.recorded else [])]
        return tuple(f"{name}{end}" for name in forward for end in ("", "_backward"))


# What every elementwise operator is tried on.
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
