"""Gradients of operators: a call of the backward operator, or a Python function.

The names of the backward operator's arguments say where they come from:

    grad_…                          gradients of the leading outputs, in order (… is not checked)
    NAME                            an argument or an output of the operator; a single unnamed
                                    output is called `output`
    output_mask                     one bool per tensor argument that the operator does not mutate:
                                    whether its gradient is needed
    height, width, channels_last    properties of the first argument, an image

Autograd saves the arguments, outputs and properties. The eager library (eager/autograd.h) or Python
(autograd.py) makes the call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ops.core.layout import is_channels_last
from ops.core.torch_private import OpOverload, name_of, schema_of

Optionals = Sequence[Tensor | None]


class Gradient(NamedTuple):
    """The gradient of an operator.

    Attributes:
        call: f(values, grads, needed), returns gradients of the leading arguments, None where not
            needed. `values` are the saved values, `grads` the gradients of the outputs.
        values: f(inputs, outputs), returns the values that autograd saves.
        grads: number of leading outputs that are differentiable.
        eager: the last four arguments of register_autograd (eager/autograd.h). None if `call` is a
            Python function.
    """

    call: Callable[[Sequence[Any], Optionals, Sequence[bool]], Any]
    values: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Any]]
    grads: int
    eager: tuple[str, str, list[int], list[int]] | None = None


def make_gradient(op: OpOverload, backward: OpOverload | Callable[..., Any]) -> Gradient:
    """Return the gradient that is a call of the operator or function `backward`.

    Raises:
        TypeError: `backward` is an operator whose schema does not fit that of `op`.
    """
    arguments, returns = schema_of(op).arguments, schema_of(op).returns
    if not isinstance(backward, OpOverload):
        return Gradient(backward, lambda inputs, outputs: inputs, len(returns))
    operator = backward
    error = f"{name_of(op)}: gradient {name_of(operator)}: "
    tensors = [i for i, x in enumerate(arguments) if _is_tensor(x) and not is_mutable(x)]
    # By name: kind of source (Source::Kind in eager/gradient.h), index, type.
    known = {
        "output_mask": ("m", 0, "List[bool]"),
        "height": ("h", 0, "int"),
        "width": ("w", 0, "int"),
        "channels_last": ("l", 0, "bool"),
    }
    known |= {x.name or "output": ("o", i, "Tensor") for i, x in enumerate(returns)}
    for i, x in enumerate(arguments):
        known[x.name] = ("t" if _is_tensor(x) else "c", i, str(x.type))
    kinds, grads = "", 0
    indices: list[int] = []
    for x in schema_of(operator).arguments:
        is_grad = x.name.startswith("grad_")
        kind, index, type_ = ("g", grads, "Tensor") if is_grad else known.get(x.name, ("", 0, ""))
        if not kind or str(x.type) not in (type_, f"Optional[{type_}]"):
            raise TypeError(
                f"{error}{x.name}: {x.type} is neither in {schema_of(op)} nor a gradient"
            )
        kinds, indices, grads = kinds + kind, [*indices, index], grads + is_grad
    results = len(schema_of(operator).returns)
    if results != len(tensors) or not 0 < grads <= len(returns):
        raise TypeError(
            f"{error}{grads} gradients of {len(returns)} outputs, {results} outputs for "
            f"{len(tensors)} tensor arguments"
        )

    def values(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> list[Any]:
        get: dict[str, Callable[[int], Any]] = {
            "t": inputs.__getitem__,
            "c": inputs.__getitem__,
            "o": outputs.__getitem__,
            "h": lambda i: inputs[i].shape[-2],
            "w": lambda i: inputs[i].shape[-1],
            "l": lambda i: is_channels_last(inputs[i]),
        }
        return [get[k](i) if k in get else None for k, i in zip(kinds, indices, strict=True)]

    def call(
        values: Sequence[Any], grads: Optionals, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        mask = [needed[i] for i in tensors]
        args = [
            grads[i] if kind == "g" else mask if kind == "m" else value
            for kind, i, value in zip(kinds, indices, values, strict=True)
        ]
        found = dict(zip(tensors, as_tuple(operator(*args)), strict=True))
        return [found.get(i) if needed[i] else None for i in range(len(arguments))]

    return Gradient(call, values, grads, (name_of(operator), kinds, indices, tensors))


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Return outputs or gradients as a tuple."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def is_mutable(argument: Any) -> bool:
    """Return whether the operator writes to an argument of its schema, as in Tensor(a!)."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")
