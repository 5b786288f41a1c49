"""involution2d in ONNX."""

from ops.core.onnx import Function, Ints, Node, OnnxOperator, Opset, T, sizes_of, windowed


def _function(op: Opset) -> Function:
    def Involution2d(X: T, W: T, strides: Ints, pads: Ints, dilations: Ints) -> T:
        """Involution of X [N, C, H, W] with the kernels W [N, G, kH, kW, Ho, Wo].

        C / G channels share a kernel.
        """
        # Shape with start and end: exporters fold it if these sizes are fixed
        kernel_h, kernel_w = op.Shape(W, start=2, end=3), op.Shape(W, start=3, end=4)
        out_h, out_w = op.Shape(W, start=4, end=5), op.Shape(W, start=5, end=6)
        stride = op.Constant(value_ints=strides)
        dilation = op.Constant(value_ints=dilations)

        # Row and column indices of the windows in the padded X: [kH Ho] and [kW Wo], flat because
        # tinygrad gathers nothing else.
        first, second = op.Constant(value_int=0), op.Constant(value_int=1)
        taps_h = op.Mul(op.Range(first, op.Squeeze(kernel_h), second), op.Gather(dilation, first))
        taps_w = op.Mul(op.Range(first, op.Squeeze(kernel_w), second), op.Gather(dilation, second))
        starts_h = op.Mul(op.Range(first, op.Squeeze(out_h), second), op.Gather(stride, first))
        starts_w = op.Mul(op.Range(first, op.Squeeze(out_w), second), op.Gather(stride, second))
        one, flat = op.Constant(value_ints=[1]), op.Constant(value_ints=[-1])
        rows = op.Reshape(op.Add(op.Unsqueeze(taps_h, one), starts_h), flat)
        columns = op.Reshape(op.Add(op.Unsqueeze(taps_w, one), starts_w), flat)

        none = op.Constant(value_ints=[0, 0])
        pad = op.Constant(value_ints=pads)
        begin = op.Gather(pad, op.Constant(value_ints=[0, 1]))
        end = op.Gather(pad, op.Constant(value_ints=[2, 3]))
        padded = op.Pad(X, op.Concat(none, begin, none, end, axis=0), op.CastLike(0.0, X))
        # Transposed to gather whole rows: gathering single elements takes four times as long.
        gathered = op.Gather(op.Transpose(padded, perm=[0, 1, 3, 2]), columns, axis=2)
        images, channels = op.Shape(X, start=0, end=1), op.Shape(X, start=1, end=2)
        # No size is -1, which is ambiguous for an empty batch; with allowzero=1 none becomes -1.
        padded_h = op.Shape(padded, start=2, end=3)
        split = op.Concat(images, channels, kernel_w, out_w, padded_h, axis=0)
        gathered = op.Reshape(gathered, split, allowzero=1)
        windows = op.Gather(op.Transpose(gathered, perm=[0, 1, 2, 4, 3]), rows, axis=3)

        # [N, G, C / G, kW kH, Ho Wo]: LiteRT sums no tensor of seven axes
        groups = op.Shape(W, start=1, end=2)
        taps, pixels = op.Mul(kernel_w, kernel_h), op.Mul(out_h, out_w)
        shape = op.Concat(images, groups, op.Div(channels, groups), taps, pixels, axis=0)
        shared = op.Concat(images, groups, one, taps, pixels, axis=0)
        kernels = op.Reshape(op.Transpose(W, perm=[0, 1, 3, 2, 4, 5]), shared, allowzero=1)
        products = op.Mul(op.Reshape(windows, shape, allowzero=1), kernels)
        sums = op.ReduceSum(products, op.Constant(value_ints=[3]), keepdims=0)
        result = op.Concat(images, channels, out_h, out_w, axis=0)
        return op.Reshape(sums, result, allowzero=1)

    return Involution2d


def _node(input: T, weight: T, stride: Ints, padding: Ints, dilation: Ints) -> Node:
    kernel = sizes_of(weight)[2:4]  # not Ho, Wo: tracing fixes them to the example's
    sizes, attributes = windowed(sizes_of(input), kernel, stride, padding, dilation)
    return Node([input, weight], [sizes], attributes)


OPERATORS = {"involution2d": OnnxOperator(_function, _node)}
