"""depthwise_conv2d in ONNX."""

from typing import Optional

from ops.core.onnx import Function, Ints, Node, OnnxOperator, Opset, T, sizes_of, windowed


def _function(op: Opset) -> Function:
    def DepthwiseConv2d(
        X: T, W: T, B: Optional[T], strides: Ints, pads: Ints, dilations: Ints, group: int
    ) -> T:
        """Convolution with one filter per channel: `group` is the number of channels."""
        return op.Conv(X, W, B, strides=strides, pads=pads, dilations=dilations, group=group)

    return DepthwiseConv2d


def _node(
    input: T, weight: T, bias: Optional[T], stride: Ints, padding: Ints, dilation: Ints
) -> Node:
    groups, _, *kernel = sizes_of(weight)
    sizes, attributes = windowed(sizes_of(input), kernel, stride, padding, dilation)
    return Node([input, weight, bias], [sizes], attributes | {"group": groups})


OPERATORS = {"depthwise_conv2d": OnnxOperator(_function, _node)}
