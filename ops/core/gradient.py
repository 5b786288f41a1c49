"""Gradients of operators: a call of the backward operator, or a Python function.

The names of the backward operator's arguments say where they come from:

    grad_NAME                       gradients of the leading outputs, in the order of the outputs
    NAME                            an argument or an output of the operator; a single unnamed
                                    output is called `output`
    output_mask                     one bool per tensor argument: whether its gradient is needed
                                    (arguments that the operator mutates have none)
    height, width, channels_last    properties of the first argument, an image

Autograd saves these arguments and outputs. The eager library (eager/autograd.h) or Python
(autograd.py) makes the call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ops.core.layout import is_channels_last
from ops.core.torch_private import OpOverload, name_of, schema_of

Optionals = Sequence[Tensor | None]


class Source(NamedTuple):
    """The source of one argument of the backward operator."""

    kind: str  # a letter of Source::Kind in eager/gradient.h
    position: int  # of the gradient, argument or output
    type: str  # as in the schema


class OperatorGradient:
    """A gradient that is a call of the backward operator."""

    def __init__(self, op: OpOverload, backward: OpOverload) -> None:
        """Find the source of each argument of `backward`.

        Raises:
            TypeError: the schema of `backward` does not fit that of `op`.
        """
        self.op, self.backward = op, backward
        self.arguments = schema_of(op).arguments
        self.tensors = [
            i for i, x in enumerate(self.arguments) if _is_tensor(str(x.type)) and not is_mutable(x)
        ]
        known = {
            "output_mask": Source("m", 0, "List[bool]"),
            "height": Source("h", 0, "int"),
            "width": Source("w", 0, "int"),
            "channels_last": Source("l", 0, "bool"),
        }
        for i, x in enumerate(schema_of(op).returns):
            known[x.name or "output"] = Source("o", i, "Tensor")
        for i, x in enumerate(self.arguments):
            known[x.name] = Source("t" if _is_tensor(str(x.type)) else "c", i, str(x.type))
        self.sources: list[Source] = []
        self.grads = 0
        for x in schema_of(backward).arguments:
            if x.name.startswith("grad_"):
                source = Source("g", self.grads, "Tensor")
                self.grads += 1
            elif x.name in known:
                source = known[x.name]
            else:
                raise self._error(f"{x.name} is no argument or output of {schema_of(op)}")
            if str(x.type) not in (source.type, f"Optional[{source.type}]"):
                raise self._error(f"{x.name} is {x.type}, but {source.type} in {schema_of(op)}")
            self.sources.append(source)
        returns = len(schema_of(backward).returns)
        if returns != len(self.tensors):
            raise self._error(f"{returns} outputs for {len(self.tensors)} tensor arguments")
        if not 0 < self.grads <= len(schema_of(op).returns):
            raise self._error(f"{self.grads} gradients of {len(schema_of(op).returns)} outputs")

    def _error(self, reason: str) -> TypeError:
        return TypeError(f"{name_of(self.op)}: gradient {name_of(self.backward)}: {reason}")

    def values(self, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> list[Any]:
        """Return what autograd saves: the arguments of the call, without gradients and mask."""
        get: dict[str, Callable[[int], Any]] = {
            "t": inputs.__getitem__,
            "c": inputs.__getitem__,
            "o": outputs.__getitem__,
            "h": lambda i: inputs[i].shape[-2],
            "w": lambda i: inputs[i].shape[-1],
            "l": lambda i: is_channels_last(inputs[i]),
        }
        return [get[kind](i) if kind in get else None for kind, i, _ in self.sources]

    def call(
        self, values: Sequence[Any], grads: Optionals, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Call the backward operator; return one gradient per argument (None: not needed)."""
        mask = [needed[i] for i in self.tensors]
        args = [
            grads[i] if kind == "g" else mask if kind == "m" else value
            for (kind, i, _), value in zip(self.sources, values, strict=True)
        ]
        result: list[Tensor | None] = [None] * len(self.arguments)
        for i, grad in zip(self.tensors, as_tuple(self.backward(*args)), strict=True):
            result[i] = grad if needed[i] else None
        return result


class FunctionGradient:
    """A gradient that is a Python function, such as that of a backward operator."""

    grads = None  # all outputs are differentiable

    def __init__(self, function: Callable[..., Any]) -> None:
        """Store f(args, grads, needed)."""
        self.function = function

    def values(self, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> list[Any]:
        """Return what autograd saves: the arguments."""
        return list(inputs)

    def call(
        self, values: Sequence[Any], grads: Optionals, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return one gradient per argument (None: not needed)."""
        result = as_tuple(self.function(values, grads, needed))
        return [*result, *[None] * (len(values) - len(result))]


Gradient = OperatorGradient | FunctionGradient


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return an operator's outputs as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def is_mutable(argument: Any) -> bool:
    """Return whether the operator writes to an argument of its schema, as in Tensor(a!)."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_tensor(type_: str) -> bool:
    return type_ in ("Tensor", "Optional[Tensor]")
