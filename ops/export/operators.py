"""Register each operator's onnx.py with both PyTorch exporters.

In an exported graph, each operator is one node of the domain `lenet_ops`. The model defines the
node as a function of standard operators, so that every runtime can run it.
"""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch
from onnx import NodeProto
from onnx.defs import OpSchema
from onnxscript import OnnxFunction, script
from onnxscript.values import Op, Opset

from ops.core.onnx import Ints, Node, OnnxOperator, T, Value
from ops.core.torch_private import OpOverload, onnx_argument, schema_of

DOMAIN = "lenet_ops"
VERSION = 1  # of the domain; increment if a function's inputs, attributes or result change

_DYNAMO_OPSET = 18  # the dynamo exporter writes this opset; others by conversion
_ARGUMENT_KINDS: Any = {int: "i", bool: "b", Ints: "is"}  # codes of torch.onnx; "v": tensor
_ATTRIBUTE_TYPES = {int: OpSchema.AttrType.INT, Ints: OpSchema.AttrType.INTS}
_TENSOR_TYPES = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")  # of T

OPERATORS: dict[str, OnnxOperator] = {
    name: operator
    for file in sorted(Path(__file__).parents[1].glob("*/onnx.py"))
    if file.parent.name != "core"
    for name, operator in import_module(f"ops.{file.parent.name}.onnx").OPERATORS.items()
}


@functools.cache
def functions(opset_version: int) -> dict[str, OnnxFunction]:
    """Return the operators' ONNX functions by node name.

    A function must import the opset of the model, so each opset version has its own functions.

    Args:
        opset_version: version of the standard (`ai.onnx`) operators, 17 or newer.
    """
    op, domain = Opset("", opset_version), Opset(DOMAIN, VERSION)
    written = [
        f(op) for operator in OPERATORS.values() for f in (operator.function, *operator.others)
    ]
    return {f.__name__: script(domain, default_opset=op)(f) for f in written}


@functools.cache
def unrollers() -> dict[str, Callable[[NodeProto, int, str], list[NodeProto]]]:
    """Return `OnnxOperator.unroll` of the recurrent operators by node name."""
    return {
        operator.function(Opset("", _DYNAMO_OPSET)).__name__: operator.unroll
        for operator in OPERATORS.values()
        if operator.unroll
    }


def register_symbolics(opset_version: int) -> None:
    """Register the operators with `torch.onnx.export(..., dynamo=False)`.

    Pass `custom_opsets={DOMAIN: VERSION}` to the export. Registering again is harmless.

    Args:
        opset_version: the lowest opset that the registration applies to.
    """
    for name in OPERATORS:
        torch.onnx.register_custom_op_symbolic(  # type: ignore[attr-defined]
            f"lenet_ops::{name}", _symbolic(name), opset_version
        )


def _symbolic(name: str) -> Callable[..., Any]:
    operator = OPERATORS[name]
    returns = len(schema_of(_overload(name)).returns)
    kinds = [
        _ARGUMENT_KINDS.get(item.annotation, "v")
        for item in inspect.signature(operator.node).parameters.values()
    ]

    def symbolic(g: Any, *args: Value) -> Value:
        node = operator.node(*(onnx_argument(x, kind) for x, kind in zip(args, kinds, strict=True)))
        attributes = {f"{key}_i": value for key, value in node.attributes.items()}
        outputs = g.onnxscript_op(
            _function(name, node, g.opset), *node.inputs, outputs=len(node.sizes), **attributes
        )
        if len(node.sizes) == 1:
            outputs = [outputs]
        input_type = node.inputs[0].type()  # torch infers no types in custom domains
        typed = [
            y.setType(input_type.with_sizes(s)) for y, s in zip(outputs, node.sizes, strict=True)
        ]
        return typed[0] if returns == 1 else (*typed, *[None] * (returns - len(typed)))

    return symbolic


def translation_table(nodes: bool = False) -> dict[Callable[..., Any], Callable[..., Value]]:
    """Return the table for `torch.onnx.export(dynamo=True, custom_translation_table=...)`.

    Args:
        nodes: True: nodes of the custom domain, whose functions the caller adds to the model.
            False: standard operators, because the dynamo exporter inlines every function.
    """
    return {_overload(name): _translation(name, nodes) for name in OPERATORS}


def _translation(name: str, nodes: bool) -> Callable[..., Value]:
    make_node = OPERATORS[name].node
    returns = len(schema_of(_overload(name)).returns)

    @functools.wraps(make_node)  # the exporter reads the arguments' types
    def translation(*args: Any, **kwargs: Any) -> Value:
        node = make_node(*args, **kwargs)
        function: Any = _function(name, node, _DYNAMO_OPSET)
        if nodes:
            function = _declare_operator(function)
        outputs = function(*node.inputs, **node.attributes)
        return (outputs,) if len(node.sizes) == 1 < returns else outputs

    translation.__annotations__ = {**make_node.__annotations__, "return": T}
    return translation


def _declare_operator(function: OnnxFunction) -> Op:
    """Return an onnxscript operator with the signature of `function`."""
    signature = inspect.signature(function.function)
    inputs, attributes = [], []
    for item in signature.parameters.values():
        if item.annotation in _ATTRIBUTE_TYPES:
            kind, required = _ATTRIBUTE_TYPES[item.annotation], item.default is item.empty
            attributes.append(OpSchema.Attribute(item.name, kind, required=required))
        else:
            option = OpSchema.FormalParameterOption
            optional = option.Optional if type(None) in get_args(item.annotation) else option.Single
            inputs.append(OpSchema.FormalParameter(item.name, "T", param_option=optional))
    returned = signature.return_annotation
    outputs = 1 if returned is T else len(get_args(returned))
    schema = OpSchema(
        function.name,
        DOMAIN,
        VERSION,
        inputs=inputs,
        outputs=[OpSchema.FormalParameter(f"Y{i}", "T") for i in range(outputs)],
        type_constraints=[("T", list(_TENSOR_TYPES), "")],
        attributes=attributes,
    )
    return Op(Opset(DOMAIN, VERSION), function.name, schema)


def _function(name: str, node: Node, opset_version: int) -> OnnxFunction:
    written = (node.function or OPERATORS[name].function)(Opset("", opset_version))
    return functions(opset_version)[written.__name__]


def _overload(name: str) -> OpOverload:
    overload: OpOverload = getattr(torch.ops.lenet_ops, name).default
    return overload
