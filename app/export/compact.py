"""Reduction of the file size of a quantized graph."""

import itertools
from collections import Counter
from collections.abc import Iterator
from string import ascii_letters

from onnx import AttributeProto, GraphProto, NodeProto, helper

DEFAULTS = {  # of 2-D convolution and pooling
    "auto_pad": b"NOTSET",
    "dilations": [1, 1],
    "group": 1,
    "pads": [0, 0, 0, 0],
    "strides": [1, 1],
}


def compact(graph: GraphProto) -> None:
    """Remove names, attributes and constants without effect: most of a small file."""
    remove_optional(graph)
    compact_names(graph)


def remove_optional(graph: GraphProto) -> None:
    """Remove node names, default attributes, and zero points of convolutional weights (all 0).

    The first Conv or Gemm of a layer gets its name. The weights of a Gemm keep their zero points,
    without which ONNX Runtime computes in float32.
    """
    constants = {tensor.name for tensor in graph.initializer}
    names: set[str] = set()
    dequantized = {node.output[0]: node for node in graph.node if node.input[0] in constants}
    for node in graph.node:
        needed = [item for item in node.attribute if not is_default(node, item)]
        del node.attribute[:]
        node.attribute.extend(needed)
        node.name = ""
        if node.op_type in ("Conv", "Gemm") and node.input[1] in dequantized:
            weights = dequantized[node.input[1]]
            layer = weights.input[0].removeprefix("network.").rpartition(".")[0]
            node.name = "" if layer in names else layer
            names.add(layer)
            if node.op_type == "Conv":
                del weights.input[2:]


def is_default(node: NodeProto, attribute: AttributeProto) -> bool:
    """Return whether `node` computes the same without `attribute`."""
    if (node.op_type, attribute.name) == ("Conv", "kernel_shape"):
        return True  # the size of the weights
    return bool(DEFAULTS.get(attribute.name) == helper.get_attribute_value(attribute))


def compact_names(graph: GraphProto) -> None:
    """Merge equal constants; shorten names, except of inputs and outputs."""
    if any(item.HasField("g") for node in graph.node for item in node.attribute):
        return  # a subgraph may use the names
    fixed = {"", *(x.name for x in (*graph.input, *graph.output))}
    first: dict[bytes, str] = {}
    same: dict[str, str] = {}
    for tensor in graph.initializer:
        name, tensor.name = tensor.name, ""  # compare without the name
        content, tensor.name = tensor.SerializeToString(), name
        same[name] = name if name in fixed else first.setdefault(content, name)
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
    uses = Counter(name for node in graph.node for name in (*node.input, *node.output))
    fresh = (name for name in letters() if name not in fixed)
    names = {name: next(fresh) for name, _ in uses.most_common() if name not in fixed}
    names |= {name: name for name in fixed}
    for node in graph.node:
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    constants = [tensor for tensor in graph.initializer if tensor.name in names]
    for tensor in constants:
        tensor.name = names[tensor.name]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def letters() -> Iterator[str]:
    """Yield a, b, … Z, then aa, ab, and so on."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(ascii_letters, repeat=length))
