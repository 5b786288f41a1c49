"""Check ONNX files against limits that ONNX Runtime does not enforce."""

from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto

DOMAIN = "lenet_ops"  # of the exported functions; importing `ops.export` would take a second
STANDARD = ("", "ai.onnx")
MAX_BYTES = 2**28  # the largest `SeparableConfig` has 252 MB of weights
MAX_NODES = 10_000  # with the nodes of functions, for each call


def read_model(path: Path) -> bytes:
    """Return the content of an ONNX file; raise a ValueError if it exceeds a limit.

    Functions that call each other could double the number of nodes at every level.
    """
    content = _read(path)
    model = onnx.load_model_from_string(content)
    functions, graph = model.functions, model.graph
    if foreign := sorted({function.domain for function in functions} - {DOMAIN}):
        raise ValueError(f"it defines functions of the domain {foreign[0]!r}, not of {DOMAIN}")
    bodies = [list(_nodes(function)) for function in functions]
    if any(node.domain not in STANDARD for body in bodies for node in body):
        raise ValueError("it defines a function with operators that are not standard")
    longest = max(map(len, bodies), default=1)
    count = sum(1 if node.domain in STANDARD else longest for node in _nodes(graph))
    if count > MAX_NODES:
        raise ValueError(f"it has more than {MAX_NODES:,} nodes")
    tensors = (tensor for part in (graph, *functions) for tensor in _tensors(part))
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors):
        raise ValueError("it has weights in another file")
    return content


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of an ONNX file."""
    model = onnx.load_model_from_string(_read(path))
    return {item.key: item.value for item in model.metadata_props}


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return path.read_bytes()


def _nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph or a function and of its subgraphs."""
    yield from graph.node
    for attribute in _attributes(graph):
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _nodes(subgraph)


def _tensors(graph: GraphProto | FunctionProto) -> Iterator[TensorProto]:
    """Yield the constants of a graph or a function and of its subgraphs."""
    if isinstance(graph, GraphProto):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for attribute in _attributes(graph):
        sparse = attribute.sparse_tensor
        yield from (attribute.t, *attribute.tensors, sparse.values, sparse.indices)
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _tensors(subgraph)


def _attributes(graph: GraphProto | FunctionProto) -> Iterator[AttributeProto]:
    """Yield the attributes of the nodes, and the default attributes of a function."""
    for node in graph.node:
        yield from node.attribute
    if isinstance(graph, FunctionProto):
        yield from graph.attribute_proto
