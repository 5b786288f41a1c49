"""Gradient formulas as in PyTorch's derivatives.yaml: a call of the backward operator.

    "exp_backward(grad, output)"
    "max_pool2d_backward(grads[0], indices, kernel_size, input.height, input.width, …)"

Autograd saves the arguments and outputs named in the formula. The eager library (eager/autograd.h)
or Python (autograd.py) executes it. Terms:

    grad                    gradient of the only output
    grads[i]                gradient of output i
    grad_input_mask         one bool per tensor argument: whether its gradient is needed (arguments
                            that the operator mutates have none)
    NAME                    an argument or output; a single unnamed output is called `output`
    NAME.height, NAME.width, NAME.channels_last      property of an image argument
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ops.core.layout import is_channels_last
from ops.core.torch_private import OpOverload, name_of, schema_of

Kind = Literal["grad", "mask", "tensor", "constant", "output", "height", "width", "channels_last"]

_IMAGE_PROPERTIES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "height": (lambda x: x.shape[-2], "int"),
    "width": (lambda x: x.shape[-1], "int"),
    "channels_last": (is_channels_last, "bool"),
}


class Term(NamedTuple):
    """The source of one argument of the backward operator."""

    kind: Kind
    position: int  # index of the gradient, argument or output
    type: str  # as in the schema


class Formula:
    """A gradient formula, checked against the schemas of its operators."""

    def __init__(self, op: OpOverload, text: str) -> None:
        """Parse `text`, the gradient of `op`.

        Raises:
            TypeError: the formula does not fit the schema of `op` or of the backward operator.
        """
        self.op, self.text = op, text
        self.schema = schema_of(op)
        call = re.fullmatch(r"(\w+)\((.*)\)", text)
        if call is None or not hasattr(torch.ops.lenet_ops, call[1]):
            raise self._error("is not a call of an operator of lenet_ops")
        self.backward: OpOverload = getattr(torch.ops.lenet_ops, call[1]).default
        self.terms = [self._parse(term.strip()) for term in call[2].split(",")]
        self.tensors = [
            i
            for i, x in enumerate(self.schema.arguments)
            if _is_tensor(str(x.type)) and not is_mutable(x)
        ]
        self.grads = 1 + max((t.position for t in self.terms if t.kind == "grad"), default=-1)
        self._check()

    def _parse(self, term: str) -> Term:
        names = [x.name for x in self.schema.arguments]
        outputs = [x.name for x in self.schema.returns]
        if outputs == [""]:
            outputs = ["output"]
        name, _, part = term.partition(".")
        if grad := re.fullmatch(r"grads\[(\d+)\]|grad", term):
            return Term("grad", int(grad[1] or 0), "Optional[Tensor]")
        if term == "grad_input_mask":
            return Term("mask", 0, "List[bool]")
        if name in names and part in _IMAGE_PROPERTIES:
            return Term(part, names.index(name), _IMAGE_PROPERTIES[part][1])  # type: ignore[arg-type]
        if term in names:
            index = names.index(term)
            type_ = str(self.schema.arguments[index].type)
            return Term("tensor" if _is_tensor(type_) else "constant", index, type_)
        if term in outputs:
            return Term("output", outputs.index(term), "Tensor")
        raise self._error(f"{term} is no gradient, argument or output of {self.schema}")

    def _check(self) -> None:
        schema = schema_of(self.backward)
        if len(schema.arguments) != len(self.terms):
            raise self._error(
                f"has {len(self.terms)} arguments, the operator takes {len(schema.arguments)}"
            )
        for term, argument in zip(self.terms, schema.arguments, strict=True):
            wanted = str(argument.type)
            gradient = term.kind == "grad" and _is_tensor(wanted)
            if not gradient and wanted not in (term.type, f"Optional[{term.type}]"):
                raise self._error(f"passes {term.type} for {argument.name}, which is {wanted}")
        if len(schema.returns) != len(self.tensors):
            raise self._error(
                f"returns {len(schema.returns)} gradients for {len(self.tensors)} tensor arguments"
            )
        given = {term.position for term in self.terms if term.kind == "grad"}
        if given != set(range(self.grads)) or not 0 < self.grads <= len(self.schema.returns):
            raise self._error("must take the gradients of one or several leading outputs")

    def _error(self, reason: str) -> TypeError:
        return TypeError(f"{name_of(self.op)}: the gradient formula {self.text!r} {reason}")

    def saved(self, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the tensors to save, in the order of the terms."""
        sources = {"tensor": inputs, "output": outputs}
        return [sources[t.kind][t.position] for t in self.terms if t.kind in sources]

    def constants(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the non-tensor values to save, in the order of the terms."""
        kept = []
        for kind, index, _ in self.terms:
            if kind in _IMAGE_PROPERTIES:
                kept.append(_IMAGE_PROPERTIES[kind][0](inputs[index]))
            elif kind == "constant":
                kept.append(inputs[index])
        return kept

    def call(
        self,
        grads: Sequence[Tensor | None],
        saved: Sequence[Tensor | None],
        constants: Sequence[Any],
        needed: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """Call the backward operator; return one gradient per argument (None: not needed)."""
        mask = [needed[i] for i in self.tensors]
        saved_left, constants_left = iter(saved), iter(constants)
        args: list[Any] = []
        for term in self.terms:
            if term.kind == "grad":
                args.append(grads[term.position])
            elif term.kind == "mask":
                args.append(mask)
            elif term.kind in ("tensor", "output"):
                args.append(next(saved_left))
            else:
                args.append(next(constants_left))
        outputs = self.backward(*args)
        result: list[Tensor | None] = [None] * len(self.schema.arguments)
        for i, grad in zip(self.tensors, as_tuple(outputs), strict=True):
            result[i] = grad if needed[i] else None
        return tuple(result)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return an operator's outputs as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def is_mutable(argument: Any) -> bool:
    """Return whether the operator writes to an argument of its schema, as in Tensor(a!)."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_tensor(type_: str) -> bool:
    return type_ in ("Tensor", "Optional[Tensor]")
