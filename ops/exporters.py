"""Teaches the operators to PyTorch's two exporters, each from its row in `ops.onnx`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.onnx import symbolic_helper

from ops.onnx import DOMAIN, OPERATORS, T, Value, bare_operator, functions

_DYNAMO_OPSET = 18  # which that exporter translates to, before it converts to the one asked for
_ARGUMENT_KINDS: Any = {int: "i", Sequence[int]: "is"}  # torch's letters; "v": a tensor


def register_symbolics(opset_version: int) -> None:
    """Teaches the operators to `torch.onnx.export(..., dynamo=False)`.

    Pass `custom_opsets={DOMAIN: VERSION}` to the export. Registering again is harmless.

    Args:
        opset_version: The opset that is going to be exported, and the least one this serves.
    """
    for name in OPERATORS:
        torch.onnx.register_custom_op_symbolic(  # type: ignore[attr-defined]
            f"{DOMAIN}::{name}", _symbolic(name), opset_version
        )


def _symbolic(name: str) -> Callable[..., Any]:
    node_name, node_of = OPERATORS[name]
    returns = len(_overload(name)._schema.returns)
    kinds = [
        _ARGUMENT_KINDS.get(item.annotation, "v")
        for item in inspect.signature(node_of).parameters.values()
    ]

    def symbolic(g: Any, *args: Value) -> Value:
        node = node_of(
            *(symbolic_helper._parse_arg(x, kind) for x, kind in zip(args, kinds, strict=True))
        )
        attributes = {f"{key}_i": value for key, value in node.attributes.items()}
        outputs = g.onnxscript_op(
            functions(g.opset)[node_name], *node.inputs, outputs=len(node.sizes), **attributes
        )
        if len(node.sizes) == 1:
            outputs = [outputs]
        of_input = node.inputs[0].type()  # set by hand: torch infers none for a domain of ours
        typed = [
            y.setType(of_input.with_sizes(s)) for y, s in zip(outputs, node.sizes, strict=True)
        ]
        return typed[0] if returns == 1 else (*typed, *[None] * (returns - len(typed)))

    return symbolic


def translation_table(nodes: bool = False) -> dict[Any, Callable[..., Value]]:
    """The operators for `torch.onnx.export(..., dynamo=True, custom_translation_table=...)`.

    Args:
        nodes: Put nodes of our domain into the graph, for the caller to add the functions that say
            what they mean. Otherwise the meaning is put there itself: that exporter inlines every
            function.
    """
    return {_overload(name): _translation(name, nodes) for name in OPERATORS}


def _translation(name: str, nodes: bool) -> Callable[..., Value]:
    node_name, node_of = OPERATORS[name]
    returns = len(_overload(name)._schema.returns)
    function: Any = functions(_DYNAMO_OPSET)[node_name]
    if nodes:
        function = bare_operator(function)

    @functools.wraps(node_of)  # the exporter reads the arguments' types
    def translation(*args: Any, **kwargs: Any) -> Value:
        node = node_of(*args, **kwargs)
        outputs = function(*node.inputs, **node.attributes)
        return (outputs,) if len(node.sizes) == 1 < returns else outputs

    translation.__annotations__ = {**node_of.__annotations__, "return": T}
    return translation


def _overload(name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.lenet_ops, name).default
    return overload
