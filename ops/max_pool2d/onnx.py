"""max_pool2d in ONNX."""

from ops.core.onnx import Function, Ints, Node, OnnxOperator, Opset, T, sizes_of, windowed


def _function(op: Opset) -> Function:
    def MaxPool2d(X: T, kernel_shape: Ints, strides: Ints, pads: Ints, dilations: Ints) -> T:
        """Maximum of each window."""
        return op.MaxPool(
            X, kernel_shape=kernel_shape, strides=strides, pads=pads, dilations=dilations
        )

    return MaxPool2d


def _node(
    input: T, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: int
) -> Node:
    image = sizes_of(input)
    sizes, attributes = windowed(image, kernel_size, stride, padding, dilation, bool(ceil_mode))
    attributes["kernel_shape"] = list(kernel_size)
    if ceil_mode:  # expressed as padding, because opsets define the last window differently
        if None in image[2:]:
            raise ValueError("max_pool2d: with ceil_mode, ONNX needs height and width to be fixed")
        for side in (0, 1):
            reach = (sizes[2 + side] - 1) * stride[side] + dilation[side] * (kernel_size[side] - 1)
            over = reach + 1 - image[2 + side] - padding[side]
            if over >= kernel_size[side]:
                raise ValueError(
                    f"max_pool2d: with ceil_mode, the last window reaches {over} pixels over the "
                    f"image; ONNX Runtime allows fewer than kernel_size={kernel_size[side]}"
                )
            attributes["pads"][2 + side] = max(0, over)
    return Node([input], [sizes], attributes)


OPERATORS = {"max_pool2d": OnnxOperator(_function, _node)}
