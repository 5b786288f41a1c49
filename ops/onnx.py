"""What each operator means in ONNX, written once and served to every way of exporting.

An exported graph shows one node an operator, of the domain `lenet_ops`. The model carries the
node's meaning as a local function in standard operators, so that every runtime can run it.
"""

# Types as onnxscript reads them (it knows Union, not X | Y), names as ONNX writes them:
# ruff: noqa: N802, N803, UP006, UP007, UP035, UP045

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple, Optional, Tuple, TypeVar, Union, get_args

try:
    from onnx import ModelProto, TensorProto
    from onnx.defs import OpSchema
    from onnx.helper import make_tensor
    from onnx.inliner import inline_local_functions
    from onnxscript import BFLOAT16, DOUBLE, FLOAT, FLOAT16, OnnxFunction, graph, optimizer, script
    from onnxscript.values import Op, Opset
except ImportError as error:
    raise ImportError(
        "ops.onnx needs onnx and onnxscript: pip install 'lenet-ops[onnx]'", name=error.name
    ) from error
from torch.onnx import symbolic_helper

from ops.core.windows import count_places

DOMAIN = "lenet_ops"
VERSION = 1  # of the domain: raise it when a function's inputs, attributes or meaning change

_SLOPE = make_tensor("slope", TensorProto.DOUBLE, [], [1.702])  # exact enough for any type

T = TypeVar("T", bound=Union[FLOAT, FLOAT16, DOUBLE, BFLOAT16])
Value = Any  # of the graph being exported: torch._C.Value or onnx_ir.Value
Sizes = Any  # a list of int or, for dynamic ones, None; None where not even their number is known

_TENSOR_TYPES = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")  # T's
_ATTRIBUTE_TYPES = {int: OpSchema.AttrType.INT, Sequence[int]: OpSchema.AttrType.INTS}


@functools.cache
def functions(opset_version: int) -> dict[str, OnnxFunction]:
    """Writes the operators in one version of the standard operators, each under its node's name.

    A function has to import the same opset as the model that carries it: hence one set a version.

    Args:
        opset_version: Version of the standard (`ai.onnx`) operators, 17 or newer.
    """
    op = Opset("", opset_version)
    written: dict[str, OnnxFunction] = {}

    def meaning(function: Callable[..., Any]) -> OnnxFunction:
        written[function.__name__] = script(Opset(DOMAIN, VERSION), default_opset=op)(function)
        return written[function.__name__]

    @meaning
    def GELU(X: T) -> T:
        """The sigmoid approximation of GELU: x * sigmoid(1.702 x)."""
        slope = op.CastLike(op.Constant(value=_SLOPE), X)
        return op.Mul(X, op.Sigmoid(op.Mul(slope, X)))

    @meaning
    def NCReLU(X: T, axis: int = 1) -> T:
        """Positive and negative parts side by side: concat(max(x, 0), min(x, 0))."""
        # ONNX Runtime's bounds where none are given are finite.
        zero = op.CastLike(0.0, X)
        least = op.CastLike(-inf, X)
        most = op.CastLike(inf, X)
        return op.Concat(op.Clip(X, zero, most), op.Clip(X, least, zero), axis=axis)

    @meaning
    def DepthwiseConv2d(
        X: T,
        W: T,
        B: Optional[T],
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
        group: int,
    ) -> T:
        """Convolution with one filter a channel: `group` is the number of channels."""
        return op.Conv(X, W, B, strides=strides, pads=pads, dilations=dilations, group=group)

    @meaning
    def Exp(X: T) -> T:
        """The exponential function."""
        return op.Exp(X)

    @meaning
    def GlobalAvgPool2d(X: T) -> T:
        """Every channel's mean over its image."""
        return op.GlobalAveragePool(X)

    @meaning
    def Involution2d(
        X: T,
        W: T,
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
    ) -> T:
        """Windows of X [N, C, H, W] times kernels of their own, W [N, G, kH, kW, Ho, Wo], summed.

        C / G channels share a kernel.
        """
        first, second = op.Constant(value_int=0), op.Constant(value_int=1)
        kernel_h = op.Gather(op.Shape(W), op.Constant(value_int=2))
        kernel_w = op.Gather(op.Shape(W), op.Constant(value_int=3))
        out_h = op.Gather(op.Shape(W), op.Constant(value_int=4))
        out_w = op.Gather(op.Shape(W), op.Constant(value_int=5))
        stride = op.Constant(value_ints=strides)
        dilation = op.Constant(value_ints=dilations)

        # The rows and columns of x, padded, that the windows are made of: [kH, Ho] and [kW, Wo].
        taps_h = op.Mul(op.Range(first, kernel_h, second), op.Gather(dilation, first))
        taps_w = op.Mul(op.Range(first, kernel_w, second), op.Gather(dilation, second))
        places_h = op.Mul(op.Range(first, out_h, second), op.Gather(stride, first))
        places_w = op.Mul(op.Range(first, out_w, second), op.Gather(stride, second))
        last = op.Constant(value_ints=[1])
        rows = op.Add(op.Unsqueeze(taps_h, last), places_h)
        columns = op.Add(op.Unsqueeze(taps_w, last), places_w)

        none = op.Constant(value_ints=[0, 0])
        pad = op.Constant(value_ints=pads)
        begin = op.Gather(pad, op.Constant(value_ints=[0, 1]))
        end = op.Gather(pad, op.Constant(value_ints=[2, 3]))
        padded = op.Pad(X, op.Concat(none, begin, none, end, axis=0), op.CastLike(0.0, X))
        # Transposed, so that whole rows are gathered: numbers one by one take four times as long.
        across = op.Gather(op.Transpose(padded, perm=[0, 1, 3, 2]), columns, axis=2)
        windows = op.Gather(op.Transpose(across, perm=[0, 1, 2, 4, 3]), rows, axis=3)

        # [N, G, C / G, kW, kH, Ho, Wo]
        order = op.Constant(value_ints=[3, 2, 4, 5])
        shape = op.Concat(
            op.Constant(value_ints=[0]),
            op.Shape(W, start=1, end=2),
            op.Constant(value_ints=[-1]),
            op.Gather(op.Shape(W), order),
            axis=0,
        )
        kernels = op.Unsqueeze(
            op.Transpose(W, perm=[0, 1, 3, 2, 4, 5]), op.Constant(value_ints=[2])
        )
        products = op.Mul(op.Reshape(windows, shape), kernels)
        sums = op.ReduceSum(products, op.Constant(value_ints=[3, 4]), keepdims=0)
        images = op.Concat(op.Constant(value_ints=[0, -1]), op.Shape(W, start=4), axis=0)
        return op.Reshape(sums, images)

    @meaning
    def LLTMCell(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T]:
        """One step: [i, o, z] = [h, x] * W' + b, c' = c + elu(z) * s(i), h' = tanh(c') * s(o)."""
        size = op.Shape(C, start=1)
        twice = op.Add(size, size)
        gates = op.Gemm(op.Concat(H, X, axis=1), W, B, transB=1)
        i = op.Slice(gates, [0], size, [1])
        o = op.Slice(gates, size, twice, [1])
        z = op.Slice(gates, twice, op.Add(twice, size), [1])
        cell = op.Add(C, op.Mul(op.Elu(z), op.Sigmoid(i)))
        return op.Mul(op.Tanh(cell), op.Sigmoid(o)), cell

    @meaning
    def LLTM(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T, T]:
        """LLTMCell over the steps of X, each to the state before it: all h, the last h and c."""
        size = op.Shape(C, start=1)
        twice = op.Add(size, size)
        rest = op.Add(twice, size)
        # Transposed here: ONNX Runtime warns of a Slice whose output the body of a Scan takes.
        weights_h = op.Transpose(op.Slice(W, [0], size, [1]), perm=[1, 0])
        weights_x = op.Transpose(op.Slice(W, size, op.Shape(W, start=1), [1]), perm=[1, 0])
        products = op.MatMul(X, weights_x)

        @graph()
        def step(h: T, c: T, product: T) -> Tuple[T, T, T]:
            gates = op.Add(product, op.Gemm(h, weights_h, B))
            i = op.Slice(gates, [0], size, [1])
            o = op.Slice(gates, size, twice, [1])
            z = op.Slice(gates, twice, rest, [1])
            cell = op.Add(c, op.Mul(op.Elu(z), op.Sigmoid(i)))
            new_h = op.Mul(op.Tanh(cell), op.Sigmoid(o))
            return new_h, cell, op.Identity(new_h)

        last_h, last_cell, all_h = op.Scan(H, C, products, body=step, num_scan_inputs=1)
        return all_h, last_h, last_cell

    @meaning
    def MaxPool2d(
        X: T,
        kernel_shape: Sequence[int],
        strides: Sequence[int],
        pads: Sequence[int],
        dilations: Sequence[int],
    ) -> T:
        """The largest element of every window."""
        return op.MaxPool(
            X, kernel_shape=kernel_shape, strides=strides, pads=pads, dilations=dilations
        )

    return written


class Node(NamedTuple):
    """What a node of ours is made with, from the arguments of the operator in PyTorch."""

    inputs: Sequence[Value]
    sizes: Sequence[Sizes]  # of each output
    attributes: Mapping[str, Any] = MappingProxyType({})


def _elementwise(input: T) -> Node:
    return Node([input], [_sizes(input)])


def _ncrelu(input: T, dim: int) -> Node:
    sizes = _sizes(input)
    if sizes is not None and sizes[dim] is not None:
        sizes[dim] *= 2
    return Node([input], [sizes], {"axis": dim})


def _depthwise_conv2d(
    input: T,
    weight: T,
    bias: Optional[T],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Node:
    groups, _, *kernel = _sizes(weight)
    sizes = _window_sizes(_sizes(input), kernel, stride, padding, dilation)
    attributes = _window_attributes(stride, padding, dilation)
    return Node([input, weight, bias], [sizes], attributes | {"group": groups})


def _global_avg_pool2d(input: T) -> Node:
    return Node([input], [[*_sizes(input)[:2], 1, 1]])


def _involution2d(
    input: T, weight: T, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Node:
    kernel = _sizes(weight)[2:4]  # what follows, the places, tracing takes from the example
    sizes = _window_sizes(_sizes(input), kernel, stride, padding, dilation)
    return Node([input, weight], [sizes], _window_attributes(stride, padding, dilation))


# What our kernels keep for backward is no output of a node, here and below.
def _max_pool2d(
    input: T,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: int,
) -> Node:
    image = _sizes(input)
    sizes = _window_sizes(image, kernel_size, stride, padding, dilation, bool(ceil_mode))
    attributes = _window_attributes(stride, padding, dilation) | {"kernel_shape": list(kernel_size)}
    if ceil_mode:  # as padding, since what ONNX says of the last window differs between opsets
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


def _lltm_cell(input: T, weights: T, bias: Optional[T], old_h: T, old_cell: T) -> Node:
    state = _sizes(old_cell)
    return Node([input, weights, old_h, old_cell, bias], [state, state])


def _lltm(sequence: T, weights: T, bias: Optional[T], h0: T, c0: T) -> Node:
    state = _sizes(c0)
    outputs = [[*_sizes(sequence)[:2], state[1]], state, state]
    return Node([sequence, weights, h0, c0, bias], outputs)


# Each operator of torch.ops.lenet_ops: the name of its node, which functions() writes, and what
# the node is made with.
OPERATORS: dict[str, tuple[str, Callable[..., Node]]] = {
    "depthwise_conv2d": ("DepthwiseConv2d", _depthwise_conv2d),
    "exp": ("Exp", _elementwise),
    "gelu": ("GELU", _elementwise),
    "global_avg_pool2d": ("GlobalAvgPool2d", _global_avg_pool2d),
    "involution2d": ("Involution2d", _involution2d),
    "lltm": ("LLTM", _lltm),
    "lltm_cell": ("LLTMCell", _lltm_cell),
    "max_pool2d": ("MaxPool2d", _max_pool2d),
    "ncrelu": ("NCReLU", _ncrelu),
}


def _sizes(x: Value) -> Sizes:
    """Returns the sizes of a tensor in either exporter's graph."""
    sizes = x.shape if hasattr(x, "shape") else symbolic_helper._get_tensor_sizes(x)
    return None if sizes is None else [s if isinstance(s, int) else None for s in sizes]


def _window_sizes(
    input: list[int | None],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> Sizes:
    """Of the output for an input [N, C, H, W]."""
    windows = zip(input[2:], kernel, stride, padding, dilation, strict=True)
    places = [None if w[0] is None else count_places(w[0], *w[1:], ceil_mode) for w in windows]
    return [*input[:2], *places]


def _window_attributes(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> dict[str, Any]:
    """ONNX pads each side of each dimension: all the beginnings, then all the ends."""
    return {
        "strides": list(stride),
        "pads": [*padding, *padding],
        "dilations": list(dilation),
    }


def bare_operator(function: OnnxFunction) -> Op:
    """An operator with the signature of a function, but not its body."""
    signature = inspect.signature(function.function)
    inputs, attributes = [], []
    for item in signature.parameters.values():
        if item.annotation in _ATTRIBUTE_TYPES:
            kind, required = _ATTRIBUTE_TYPES[item.annotation], item.default is item.empty
            attributes.append(OpSchema.Attribute(item.name, kind, required=required))
        else:
            option = OpSchema.FormalParameterOption
            optional = option.Optional if type(None) in get_args(item.annotation) else option.Single
            inputs.append(OpSchema.FormalParameter(item.name, "T", param_option=optional))
    returned = signature.return_annotation
    outputs = 1 if returned is T else len(get_args(returned))
    schema = OpSchema(
        function.name,
        DOMAIN,
        VERSION,
        inputs=inputs,
        outputs=[OpSchema.FormalParameter(f"Y{i}", "T") for i in range(outputs)],
        type_constraints=[("T", list(_TENSOR_TYPES), "")],
        attributes=attributes,
    )
    return Op(Opset(DOMAIN, VERSION), function.name, schema)


def inline(model: ModelProto) -> ModelProto:
    """Returns the model with its functions' bodies in the place of their nodes, and simplified."""
    model = inline_local_functions(model)
    del model.graph.value_info[:]  # of tracing: in some, what is dynamic has the example's size
    return optimizer.optimize(model)
