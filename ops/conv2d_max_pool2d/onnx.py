"""conv2d_max_pool2d in ONNX."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

from onnxscript.values import Opset

from ops.core.onnx import Node, OnnxOperator, T, sizes_of, window_attributes, window_sizes


def _function(op: Opset) -> Callable[..., Any]:
    def Conv2dMaxPool2d(
        X: T,
        W: T,
        B: Optional[T],
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
        kernel_shape: Sequence[int],
    ) -> T:
        """Maximum of each window of a convolution."""
        image = op.Conv(X, W, B, strides=strides, pads=pads, dilations=dilations)
        return op.MaxPool(image, kernel_shape=kernel_shape, strides=kernel_shape)

    return Conv2dMaxPool2d


def _node(
    input: T,
    weight: T,
    bias: Optional[T],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    pool: Sequence[int],
) -> Node:
    channels, _, *kernel = sizes_of(weight)
    image = window_sizes(sizes_of(input), kernel, stride, padding, dilation)
    sizes = [image[0], channels, *window_sizes(image, pool, pool, (0, 0), (1, 1))[2:]]
    attributes = window_attributes(stride, padding, dilation) | {"kernel_shape": list(pool)}
    return Node([input, weight, bias], [sizes], attributes)


OPERATORS = {"conv2d_max_pool2d": OnnxOperator(_function, _node)}
