"""export_onnx: ONNX export by either PyTorch exporter (TorchScript or dynamo)."""

import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import onnx
import onnxscript  # noqa: F401
import torch
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper
from onnx.inliner import inline_local_functions, inline_selected_functions
from onnx.shape_inference import infer_shapes
from onnx.version_converter import convert_version
from onnxscript import optimizer
from torch import nn

from ops.core import check
from ops.export.operators import (
    DOMAIN,
    VERSION,
    functions,
    register_symbolics,
    translation_table,
    unrollers,
)

DynamicAxes = Mapping[str, Mapping[int, str]]  # {input or output name: {axis: name}}
Exporter = Literal["symbolic", "dynamo"]
Layout = Literal["function", "standard"]

LEAST_OPSET = 17
DEFAULT_OPSET = 18
_LARGEST = 2**31  # bytes of a protocol buffer
_EXPORTED_OPSETS = {"symbolic": (LEAST_OPSET, 20), "dynamo": (18, 18)}  # others: by conversion


def export_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    exporter: Exporter = "symbolic",
    layout: Layout = "function",
    opset_version: int = DEFAULT_OPSET,
    input_names: Sequence[str] = ("input",),
    output_names: Sequence[str] = ("output",),
    dynamic_axes: DynamicAxes | None = None,
) -> ModelProto:
    """Export a network to an ONNX model that needs no custom kernels.

    Args:
        module: The network, in evaluation mode. float64 is exported, but ONNX Runtime's CPU
            provider lacks Conv and GlobalAveragePool in float64.
        args: Example inputs. Sizes along dynamic axes should be at least 2.
        exporter: "symbolic": tracing, `torch.onnx.export(dynamo=False)`; "dynamo": torch.export.
        layout: "function": custom operators are nodes of the domain `lenet_ops`, which the model
            defines as functions; "standard": standard operators only.
        opset_version: Opset of the standard operators, from 17 to the newest of the onnx package;
            runtimes may support fewer.
        input_names: Names of the graph's inputs.
        output_names: Names of the graph's outputs.
        dynamic_axes: Names of dynamic axes, as {input or output name: {axis: name}}.

    Returns:
        The model, in the lowest IR version for its opsets.

    Raises:
        TypeError: `module` is not an nn.Module, `opset_version` not an int.
        ValueError: An unknown exporter, layout, opset or name, a name given twice, an operator that
            the opset cannot express, or a network of 2 GiB or more.
    """
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(module, nn.Module):
        raise TypeError(f"export_onnx: module must be an nn.Module, got {type(module).__name__}")
    if exporter not in get_args(Exporter):
        raise ValueError(f"exporter={exporter}: choose from {', '.join(get_args(Exporter))}")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout}: choose from {', '.join(get_args(Layout))}")
    check.integer("export_onnx", "opset_version", opset_version)
    if not LEAST_OPSET <= opset_version <= newest:
        raise ValueError(f"opset_version={opset_version}: choose from {LEAST_OPSET} to {newest}")
    axes = dynamic_axes or {}
    if not (isinstance(axes, Mapping) and all(isinstance(it, Mapping) for it in axes.values())):
        wanted = "{input or output name: {axis: name}}"
        raise TypeError(f"export_onnx: dynamic_axes must be {wanted}, got {dynamic_axes!r}")
    names = [*input_names, *output_names]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"input_names, output_names: {', '.join(sorted(twice))} is given twice")
    if unknown := set(axes) - set(names):
        raise ValueError(
            f"dynamic_axes: no input or output is named {', '.join(sorted(unknown))}, "
            f"there are {', '.join(sorted(names))}"
        )
    size = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    if size >= _LARGEST:
        raise ValueError(
            f"export_onnx: the network has {size:,} bytes, ONNX allows fewer than {_LARGEST:,}"
        )
    least, most = _EXPORTED_OPSETS[exporter]
    export = _export_symbolic if exporter == "symbolic" else _export_dynamo
    model = export(
        module,
        args,
        axes,
        opset_version=min(max(opset_version, least), most),
        input_names=list(input_names),
        output_names=list(output_names),
    )
    model = _convert(model, opset_version)
    model = _unroll(model, most=sys.maxsize if layout == "standard" else 1)
    model = _add_functions(model, opset_version)
    if layout == "standard":
        model = _inline(model)
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    return model


def _export_symbolic(
    module: nn.Module, args: tuple[Any, ...], axes: DynamicAxes, **options: Any
) -> ModelProto:
    register_symbolics(options["opset_version"])
    buffer: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning
        )
        torch.onnx.export(module, args, buffer, dynamo=False, dynamic_axes=axes, **options)
    return onnx.load_model_from_string(buffer.getvalue())


def _export_dynamo(
    module: nn.Module, args: tuple[Any, ...], axes: DynamicAxes, **options: Any
) -> ModelProto:
    shapes = tuple(dict(axes.get(name, {})) for name in options["input_names"])
    program = torch.onnx.export(
        module,
        args,
        dynamo=True,
        dynamic_shapes=shapes if axes else None,
        custom_translation_table=translation_table(nodes=True),
        verbose=False,
        **options,
    )
    model = cast(torch.onnx.ONNXProgram, program).model_proto
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    for item in (model, graph, *graph.node, *values):
        del item.metadata_props[:]  # source lines, with local paths
    return model


def _convert(model: ModelProto, opset_version: int) -> ModelProto:
    """Convert standard operators to another opset; drop the functions of custom operators."""
    if _opset_of(model) == opset_version:
        return model
    ours = [(f.domain, f.name) for f in model.functions if f.domain == DOMAIN]
    model = inline_selected_functions(model, ours, exclude=True)  # the converter drops functions
    try:
        return convert_version(model, opset_version)
    except Exception as error:  # onnx raises several types
        reason = " ".join(str(error).split())
        raise ValueError(
            f"opset_version={opset_version}: cannot be written in it: {reason}"
        ) from error


def _add_functions(model: ModelProto, opset_version: int) -> ModelProto:
    """Add the function of each custom operator that the model uses."""
    used: dict[str, int] = {}  # largest number of inputs by operator name
    for node in _nodes(model.graph):
        if node.domain == DOMAIN:
            while node.input and not node.input[-1]:  # an omitted optional input
                node.input.pop()
            used[node.op_type] = max(len(node.input), used.get(node.op_type, 0))
    for item in [function for function in model.functions if function.domain == DOMAIN]:
        model.functions.remove(item)
    for name, inputs in sorted(used.items()):
        function = functions(opset_version)[name].to_function_proto()
        _drop_inputs(function, inputs)
        model.functions.append(function)
    for item in [opset for opset in model.opset_import if opset.domain == DOMAIN]:
        model.opset_import.remove(item)
    if used:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    return model


def _unroll(model: ModelProto, most: int) -> ModelProto:
    """Unroll recurrent operators over a fixed number of steps, the first size, up to `most`."""
    if not any(node.op_type in unrollers() for node in model.graph.node):
        return model
    del model.graph.value_info[:]  # tracing may record an example's size for a dynamic axis
    shapes = infer_shapes(model).graph
    lengths = {
        value.name: value.type.tensor_type.shape.dim[0].dim_value
        for value in (*shapes.value_info, *shapes.input)
        if value.type.tensor_type.shape.dim
    }
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        unroll = unrollers().get(node.op_type) if node.domain == DOMAIN else None
        steps = lengths.get(node.input[0], 0) if unroll else 0
        nodes += unroll(node, steps, DOMAIN) if unroll and 0 < steps <= most else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _inline(model: ModelProto) -> ModelProto:
    """Inline all functions and simplify the model."""
    model = inline_local_functions(model)
    del model.graph.value_info[:]  # tracing may record an example's size for a dynamic axis
    for _ in range(2):  # folded sizes give shapes, which give further sizes
        model = optimizer.optimize(infer_shapes(model, data_prop=True))
    for node in _nodes(model.graph):
        del node.metadata_props[:]  # names of the optimiser's rules
    return model


def _drop_inputs(function: FunctionProto, given: int) -> None:
    """Remove omitted optional inputs (index ≥ `given`) from the function and its nodes.

    ONNX Runtime optimises a Conv with two inputs better than one with an empty third input.
    """
    missing = set(function.input[given:])
    del function.input[given:]
    for node in _nodes(function):
        while node.input and node.input[-1] in missing:
            node.input.pop()


def _nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _opset_of(model: ModelProto) -> int:
    return next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
