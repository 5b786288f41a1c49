"""The parts of an operator's onnx.py: types, sizes and attributes of its ONNX node."""

# Types as onnxscript reads them, which knows Union, not X | Y:
# ruff: noqa: UP007

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, Union

from onnxscript import BFLOAT16, DOUBLE, FLOAT, FLOAT16
from onnxscript.values import Opset

from ops.core.torch_private import onnx_sizes
from ops.core.windows import count_places

T = TypeVar("T", bound=Union[FLOAT, FLOAT16, DOUBLE, BFLOAT16])
Value = Any  # of the graph being exported: torch._C.Value or onnx_ir.Value
Sizes = Any  # a list of int or, for dynamic ones, None; None if not even their number is known


class Node(NamedTuple):
    """Inputs, attributes and output sizes of a node."""

    inputs: Sequence[Value]
    sizes: Sequence[Sizes]  # of each output
    attributes: Mapping[str, Any] = MappingProxyType({})


class OnnxOperator(NamedTuple):
    """An operator's node and its definition.

    Attributes:
        function: f(op), returns the ONNX function in the standard operators `op`, for onnxscript.
            Its name is the node's.
        node: f(*args), makes the node from the arguments of the operator in torch.ops.lenet_ops.
    """

    function: Callable[[Opset], Callable[..., Any]]
    node: Callable[..., Node]


def elementwise(input: T) -> Node:
    """Make the node of an operator of one tensor that keeps its shape."""
    return Node([input], [sizes_of(input)])


def sizes_of(x: Value) -> Sizes:
    """Return the sizes of a tensor in either exporter's graph."""
    found = x.shape if hasattr(x, "shape") else onnx_sizes(x)
    return None if found is None else [s if isinstance(s, int) else None for s in found]


def window_sizes(
    input: list[int | None],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> Sizes:
    """Return the output's sizes for an input [N, C, H, W]."""
    windows = zip(input[2:], kernel, stride, padding, dilation, strict=True)
    places = [None if w[0] is None else count_places(w[0], *w[1:], ceil_mode) for w in windows]
    return [*input[:2], *places]


def window_attributes(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> dict[str, Any]:
    """Return the attributes in ONNX's form, which pads all beginnings, then all ends."""
    return {
        "strides": list(stride),
        "pads": [*padding, *padding],
        "dilations": list(dilation),
    }
