"""Helpers for each operator's onnx.py: types, sizes and attributes of the ONNX node."""

import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, Union

from onnx import NodeProto
from onnxscript import BFLOAT16, DOUBLE, FLOAT, FLOAT16
from onnxscript.values import Opset as Opset

from ops.core.torch_private import onnx_sizes
from ops.core.windows import output_length

# not of collections.abc: in Python 3.10 that counts as a class, and onnxscript fails
Ints = typing.Sequence[int]
T = TypeVar("T", bound=Union[FLOAT, FLOAT16, DOUBLE, BFLOAT16])
Function = Callable[..., Any]  # in onnxscript
Value = Any  # of the graph being exported: torch._C.Value or onnx_ir.Value
Sizes = Any  # list of int (None: dynamic size); None if the rank is unknown


class Node(NamedTuple):
    """Inputs, attributes and output sizes of a node."""

    inputs: Sequence[Value]
    sizes: Sequence[Sizes]  # of each output
    attributes: Mapping[str, Any] = MappingProxyType({})
    function: Callable[[Opset], Function] | None = None  # None: OnnxOperator.function


class OnnxOperator(NamedTuple):
    """The ONNX function of an operator, and the node that calls it.

    Attributes:
        function: f(op), returns the ONNX function in onnxscript, with standard operators of the
            opset `op`. The node has the name of the function.
        node: f(*args), returns the node for a call torch.ops.lenet_ops.NAME(*args).
        unroll: f(node, steps, domain), returns the nodes that replace the node of a recurrent
            operator over `steps` steps in `layout="standard"`, or over one step; None: the
            function is inlined.
        others: further functions that a node may call.
    """

    function: Callable[[Opset], Function]
    node: Callable[..., Node]
    unroll: Callable[[NodeProto, int, str], list[NodeProto]] | None = None
    others: Sequence[Callable[[Opset], Function]] = ()


def unary(input: T) -> Node:
    """Return the node of a one-tensor operator that keeps the shape."""
    return Node([input], [sizes_of(input)])


def sizes_of(x: Value) -> Sizes:
    """Return the sizes of a tensor in either exporter's graph."""
    found = x.shape if hasattr(x, "shape") else onnx_sizes(x)
    return None if found is None else [s if isinstance(s, int) else None for s in found]


def windowed(
    input: Sizes,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> tuple[Sizes, dict[str, Any]]:
    """Return the output sizes [N, C, Ho, Wo] for an input [N, C, H, W], and ONNX attributes."""
    windows = zip(input[2:], kernel, stride, padding, dilation, strict=True)
    size = [None if w[0] is None else output_length(w[0], *w[1:], ceil_mode) for w in windows]
    pads = [*padding, *padding]  # the start of every axis, then the ends
    attributes = {"strides": list(stride), "pads": pads, "dilations": list(dilation)}
    return [*input[:2], *size], attributes
