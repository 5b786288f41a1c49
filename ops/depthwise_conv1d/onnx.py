"""depthwise_conv1d in ONNX."""

from typing import Optional

from ops.core.onnx import Function, Ints, Node, OnnxOperator, Opset, T, sizes_of


def _function(op: Opset) -> Function:
    def DepthwiseConv1d(
        X: T, W: T, B: Optional[T], strides: Ints, pads: Ints, dilations: Ints, group: int
    ) -> T:
        """Convolution with one filter per channel: `group` is the number of channels."""
        return op.Conv(X, W, B, strides=strides, pads=pads, dilations=dilations, group=group)

    return DepthwiseConv1d


def _silu_function(op: Opset) -> Function:
    def DepthwiseConv1dSiLU(
        X: T, W: T, B: Optional[T], strides: Ints, pads: Ints, dilations: Ints, group: int
    ) -> T:
        """SiLU of a convolution with one filter per channel."""
        y = op.Conv(X, W, B, strides=strides, pads=pads, dilations=dilations, group=group)
        return op.Mul(y, op.Sigmoid(y))

    return DepthwiseConv1dSiLU


def _node(
    input: T,
    weight: T,
    bias: Optional[T],
    stride: int,
    padding: Ints,
    dilation: int,
    silu: bool,
) -> Node:
    groups, _, taps = sizes_of(weight)
    *outer, length = sizes_of(input)
    if length is not None:
        length = (length + sum(padding) - dilation * (taps - 1) - 1) // stride + 1
    attributes = {
        "strides": [stride],
        "pads": list(padding),
        "dilations": [dilation],
        "group": groups,
    }
    function = _silu_function if silu else _function
    return Node([input, weight, bias], [[*outer, length]], attributes, function)


OPERATORS = {"depthwise_conv1d": OnnxOperator(_function, _node, others=(_silu_function,))}
