"""export_onnx: one call for both of PyTorch's exporters."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import onnx
import onnxscript  # noqa: F401
import torch
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper
from onnx.inliner import inline_local_functions, inline_selected_functions
from onnx.version_converter import convert_version
from onnxscript import optimizer
from torch import nn

from ops.export.operators import (
    DOMAIN,
    VERSION,
    functions,
    register_symbolics,
    translation_table,
)

Exporter = Literal["symbolic", "dynamo"]
Layout = Literal["function", "standard"]

LEAST_OPSET = 17
DEFAULT_OPSET = 18
_EXPORTED_OPSETS = {"symbolic": (LEAST_OPSET, 20), "dynamo": (18, 18)}  # without conversion


def export_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    exporter: Exporter = "symbolic",
    layout: Layout = "function",
    opset_version: int = DEFAULT_OPSET,
    input_names: Sequence[str] = ("input",),
    output_names: Sequence[str] = ("output",),
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
) -> ModelProto:
    """Export a network to ONNX; every runtime can run its operators.

    Args:
        module: The network, in evaluation mode. In float64 the model is right, but ONNX Runtime's
            CPU provider has neither Conv nor GlobalAveragePool in it.
        args: Example inputs. Sizes along dynamic axes should be at least 2.
        exporter: "symbolic": traced, `torch.onnx.export(dynamo=False)`; "dynamo": by torch.export.
        layout: "function": our operators are nodes of the domain `lenet_ops`, whose meaning the
            model carries as functions; "standard": standard operators only.
        opset_version: Version of the standard operators, from 17 to the newest that onnx knows;
            a runtime may not know it yet.
        input_names: Names of the graph's inputs.
        output_names: Names of its outputs.
        dynamic_axes: For each name of an input or output, names of its dynamic axes.

    Returns:
        The model, in the least IR version that holds it.

    Raises:
        TypeError: Not a module.
        ValueError: An unknown exporter, layout or opset, or an operator that cannot be written in
            that opset.
    """
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(module, nn.Module):
        raise TypeError(f"export_onnx: module must be an nn.Module, got {type(module).__name__}")
    if exporter not in get_args(Exporter):
        raise ValueError(f"exporter={exporter}: choose from {', '.join(get_args(Exporter))}")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout}: choose from {', '.join(get_args(Layout))}")
    if not LEAST_OPSET <= opset_version <= newest:
        raise ValueError(f"opset_version={opset_version}: choose from {LEAST_OPSET} to {newest}")
    names = {*input_names, *output_names}
    if unknown := set(dynamic_axes or ()) - names:
        raise ValueError(
            f"dynamic_axes: no input or output is named {', '.join(sorted(unknown))}, "
            f"there are {', '.join(sorted(names))}"
        )
    least, most = _EXPORTED_OPSETS[exporter]
    export = _export_symbolic if exporter == "symbolic" else _export_dynamo
    model = export(
        module,
        args,
        opset_version=min(max(opset_version, least), most),
        input_names=list(input_names),
        output_names=list(output_names),
        dynamic_axes=dynamic_axes or {},
    )
    model = _carry_functions(_convert(model, opset_version), opset_version)
    if layout == "standard":
        model = _inline(model)
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    return model


def _export_symbolic(
    module: nn.Module,
    args: tuple[Any, ...],
    opset_version: int,
    dynamic_axes: Mapping[str, Mapping[int, str]],
    **names: list[str],
) -> ModelProto:
    register_symbolics(opset_version)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "You are using the legacy TorchScript-based ONNX export", DeprecationWarning
        )
        torch.onnx.export(
            module,
            args,
            buffer,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=opset_version,
            dynamic_axes=dynamic_axes,
            **names,  # type: ignore[arg-type]
        )
    return onnx.load_model_from_string(buffer.getvalue())


def _export_dynamo(
    module: nn.Module,
    args: tuple[Any, ...],
    opset_version: int,
    dynamic_axes: Mapping[str, Mapping[int, str]],
    **names: list[str],
) -> ModelProto:
    shapes = tuple(dict(dynamic_axes.get(name, {})) for name in names["input_names"])
    program = torch.onnx.export(
        module,
        args,
        dynamo=True,
        opset_version=opset_version,
        dynamic_shapes=shapes if dynamic_axes else None,
        custom_translation_table=translation_table(nodes=True),
        verbose=False,
        **names,  # type: ignore[arg-type]
    )
    assert program is not None
    model = program.model_proto
    for item in (model, model.graph, *model.graph.node, *model.graph.value_info):
        del item.metadata_props[:]  # lines of the source, with paths of this machine
    return model


def _convert(model: ModelProto, opset_version: int) -> ModelProto:
    """Convert the standard operators to another version; ours are nodes without functions."""
    if _opset_of(model) == opset_version:
        return model
    ours = [(f.domain, f.name) for f in model.functions if f.domain == DOMAIN]
    model = inline_selected_functions(model, ours, exclude=True)  # the converter drops functions
    try:
        return convert_version(model, opset_version)
    except Exception as error:  # onnx's, of no common type
        reason = " ".join(str(error).split())
        raise ValueError(
            f"opset_version={opset_version}: cannot be written in it: {reason}"
        ) from error


def _carry_functions(model: ModelProto, opset_version: int) -> ModelProto:
    """Add the functions of those of our operators that the model uses."""
    used: dict[str, int] = {}  # the most inputs that a node of this name has
    for node in _nodes(model.graph):
        if node.domain == DOMAIN:
            count = max((i for i, name in enumerate(node.input, 1) if name), default=0)
            used[node.op_type] = max(count, used.get(node.op_type, 0))
    others = [function for function in model.functions if function.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(others)
    for name, inputs in sorted(used.items()):
        function = functions(opset_version)[name].to_function_proto()
        _drop_inputs(function, inputs)
        model.functions.append(function)
    imports = [item for item in model.opset_import if item.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    if used:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    return model


def _inline(model: ModelProto) -> ModelProto:
    """Return the model with functions in place of their nodes, and simplified."""
    model = inline_local_functions(model)
    del model.graph.value_info[:]  # of tracing: in some, a dynamic size is the example's
    return optimizer.optimize(model)


def _drop_inputs(function: FunctionProto, given: int) -> None:
    """Drop from the body the optional last inputs that no node gives.

    ONNX Runtime does not optimise a Conv with an empty third input as one with two.
    """
    missing = set(function.input[given:])
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
