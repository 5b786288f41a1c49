"""Quantized networks, made as small as they can be."""

import itertools

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper


def keep_in_int8(graph: GraphProto) -> None:
    """Keep the weights that are still float32 in int8, with a scale for each of their rows."""
    for weights in list(graph.initializer):
        if weights.data_type != TensorProto.FLOAT or len(weights.dims) < 2:
            continue
        name, values = weights.name, numpy_helper.to_array(weights)
        largest = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        integers = np.rint(values / scale).astype(np.int8)
        weights.CopyFrom(numpy_helper.from_array(integers, f"{name}_quantized"))
        graph.initializer.append(numpy_helper.from_array(scale.ravel(), f"{name}_scale"))
        inputs = [f"{name}_quantized", f"{name}_scale"]
        graph.node.insert(0, helper.make_node("DequantizeLinear", inputs, [name], axis=0))


def shorten(graph: GraphProto, original: GraphProto) -> None:
    """Take from what the quantizer adds all that is not needed: in a small network it is the most.

    Each of its many names is that of the value it belongs to with a suffix. Values of the original
    keep their names and so do the weights; equal scales and zero points become one.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    kept = {name for node in original.node for name in (*node.input, *node.output)}
    kept |= {tensor.name + end for tensor in original.initializer for end in ("", "_quantized")}
    fresh = (name for name in map("q{}".format, itertools.count()) if name not in kept)
    names = {name: name for name in kept}
    shared: dict[bytes, str] = {}
    for name in (name for node in graph.node for name in (*node.input, *node.output)):
        if name in names:
            continue
        names[name] = next(fresh)
        if name in tensors:
            tensors[name].name = ""  # or no two would be equal
            names[name] = shared.setdefault(tensors[name].SerializeToString(), names[name])
            tensors[name].name = names[name]
    for node in graph.node:
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.name = node.output[0]
    unique = {tensor.name: tensor for tensor in tensors.values()}
    del graph.initializer[:]
    graph.initializer.extend(unique.values())
