"""What each operator means in ONNX, written once and served to every way of exporting.

An exported graph shows one node an operator, of the domain `lenet_ops`. The model carries the
node's meaning as a local function in standard operators, so that every runtime can run it.
"""

# Types as onnxscript reads them (it knows Union, not X | Y), names as ONNX writes them:
# ruff: noqa: N802, N803, UP006, UP007, UP035, UP045

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Tuple, TypeVar, Union, get_args

import torch
from onnx import ModelProto, TensorProto
from onnx.defs import OpSchema
from onnx.helper import make_tensor
from onnx.inliner import inline_local_functions
from onnxscript import BFLOAT16, DOUBLE, FLOAT, FLOAT16, OnnxFunction, graph, optimizer, script
from onnxscript.values import Op, Opset
from torch.onnx import symbolic_helper

DOMAIN = "lenet_ops"
VERSION = 1  # of the domain: raise it when a function's inputs, attributes or meaning change

_SLOPE = make_tensor("slope", TensorProto.DOUBLE, [], [1.702])  # exact enough for any type

_DYNAMO_OPSET = 18  # which that exporter translates to, before it converts to the one asked for

T = TypeVar("T", bound=Union[FLOAT, FLOAT16, DOUBLE, BFLOAT16])
Value = Any  # of the graph being exported: torch._C.Value or onnx_ir.Value


_TENSOR_TYPES = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")  # T's
_ATTRIBUTE_TYPES = {int: OpSchema.AttrType.INT, Sequence[int]: OpSchema.AttrType.INTS}


class Functions(NamedTuple):
    """The operators as ONNX functions."""

    gelu: OnnxFunction
    ncrelu: OnnxFunction
    depthwise_conv2d: OnnxFunction
    exp: OnnxFunction
    global_avg_pool2d: OnnxFunction
    involution2d: OnnxFunction
    lltm_cell: OnnxFunction
    lltm: OnnxFunction


@functools.cache
def functions(opset_version: int) -> Functions:
    """Writes the operators in one version of the standard operators.

    A function has to import the same opset as the model that carries it: hence one set a version.

    Args:
        opset_version: Version of the standard (`ai.onnx`) operators, 17 or newer.
    """
    op = Opset("", opset_version)
    lenet_ops = Opset(DOMAIN, VERSION)

    @script(lenet_ops, default_opset=op)
    def GELU(X: T) -> T:
        """The sigmoid approximation of GELU: x * sigmoid(1.702 x)."""
        slope = op.CastLike(op.Constant(value=_SLOPE), X)
        return op.Mul(X, op.Sigmoid(op.Mul(slope, X)))

    @script(lenet_ops, default_opset=op)
    def NCReLU(X: T, axis: int = 1) -> T:
        """Positive and negative parts side by side: concat(max(x, 0), min(x, 0))."""
        zero = op.CastLike(0.0, X)
        return op.Concat(op.Max(X, zero), op.Min(X, zero), axis=axis)

    @script(lenet_ops, default_opset=op)
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

    @script(lenet_ops, default_opset=op)
    def Exp(X: T) -> T:
        """The exponential function."""
        return op.Exp(X)

    @script(lenet_ops, default_opset=op)
    def GlobalAvgPool2d(X: T) -> T:
        """Every channel's mean over its image."""
        return op.GlobalAveragePool(X)

    @script(lenet_ops, default_opset=op)
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
        windows = op.Gather(op.Gather(padded, rows, axis=2), columns, axis=4)

        # [N, G, C / G, kH, Ho, kW, Wo]
        order = op.Constant(value_ints=[2, 4, 3, 5])
        shape = op.Concat(
            op.Constant(value_ints=[0]),
            op.Shape(W, start=1, end=2),
            op.Constant(value_ints=[-1]),
            op.Gather(op.Shape(W), order),
            axis=0,
        )
        kernels = op.Unsqueeze(
            op.Transpose(W, perm=[0, 1, 2, 4, 3, 5]), op.Constant(value_ints=[2])
        )
        products = op.Mul(op.Reshape(windows, shape), kernels)
        sums = op.ReduceSum(products, op.Constant(value_ints=[3, 5]), keepdims=0)
        images = op.Concat(op.Constant(value_ints=[0, -1]), op.Shape(W, start=4), axis=0)
        return op.Reshape(sums, images)

    @script(lenet_ops, default_opset=op)
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

    @script(lenet_ops, default_opset=op)
    def LLTM(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T, T]:
        """LLTMCell over the steps of X, each to the state before it: all h, the last h and c."""
        size = op.Shape(C, start=1)
        twice = op.Add(size, size)
        rest = op.Add(twice, size)
        weights_h = op.Slice(W, [0], size, [1])
        weights_x = op.Slice(W, size, op.Shape(W, start=1), [1])
        products = op.MatMul(X, op.Transpose(weights_x, perm=[1, 0]))

        @graph()
        def step(h: T, c: T, product: T) -> Tuple[T, T, T]:
            gates = op.Add(product, op.Gemm(h, weights_h, B, transB=1))
            i = op.Slice(gates, [0], size, [1])
            o = op.Slice(gates, size, twice, [1])
            z = op.Slice(gates, twice, rest, [1])
            cell = op.Add(c, op.Mul(op.Elu(z), op.Sigmoid(i)))
            new_h = op.Mul(op.Tanh(cell), op.Sigmoid(o))
            return new_h, cell, op.Identity(new_h)

        last_h, last_cell, all_h = op.Scan(H, C, products, body=step, num_scan_inputs=1)
        return all_h, last_h, last_cell

    return Functions(
        GELU, NCReLU, DepthwiseConv2d, Exp, GlobalAvgPool2d, Involution2d, LLTMCell, LLTM
    )


def register_symbolics(opset_version: int) -> None:
    """Teaches the operators to `torch.onnx.export(..., dynamo=False)`.

    Pass `custom_opsets={DOMAIN: VERSION}` to the export. Registering again is harmless.

    Args:
        opset_version: The opset that is going to be exported, and the least one this serves.
    """
    symbolics: dict[str, Callable[..., Value]] = {
        "gelu": _gelu_symbolic,
        "ncrelu": _ncrelu_symbolic,
        "depthwise_conv2d": _depthwise_conv2d_symbolic,
        "involution2d": _involution2d_symbolic,
        "exp": _exp_symbolic,
        "global_avg_pool2d": _global_avg_pool2d_symbolic,
        "lltm_cell": _lltm_cell_symbolic,
        "lltm": _lltm_symbolic,
    }
    for name, symbolic in symbolics.items():
        torch.onnx.register_custom_op_symbolic(  # type: ignore[attr-defined]
            f"{DOMAIN}::{name}", symbolic, opset_version
        )


def translation_table(nodes: bool = False) -> dict[Any, Callable[..., Value]]:
    """The operators for `torch.onnx.export(..., dynamo=True, custom_translation_table=...)`.

    Args:
        nodes: Put nodes of our domain into the graph, for the caller to add the functions that say
            what they mean. Otherwise the meaning is put there itself: that exporter inlines every
            function.
    """
    meaning: Any = functions(_DYNAMO_OPSET)
    if nodes:
        meaning = Functions(*map(_bare_operator, meaning))

    def ncrelu(input: T, dim: int = 1) -> T:
        return meaning.ncrelu(input, axis=dim)

    def depthwise_conv2d(
        input: T,
        weight: T,
        bias: Optional[T],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> T:
        attributes = _window_attributes(stride, padding, dilation)
        return meaning.depthwise_conv2d(input, weight, bias, **attributes, group=weight.shape[0])

    def involution2d(
        input: T, weight: T, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> T:
        attributes = _window_attributes(stride, padding, dilation)
        return meaning.involution2d(input, weight, **attributes)

    def gelu(input: T) -> T:
        return meaning.gelu(input)

    def exp(input: T) -> T:
        return meaning.exp(input)

    def global_avg_pool2d(input: T) -> T:
        return meaning.global_avg_pool2d(input)

    # What our kernels keep for backward is no output of a node.
    def lltm_cell(input: T, weights: T, bias: Optional[T], h: T, c: T) -> Sequence[T]:
        return meaning.lltm_cell(input, weights, h, c, bias)

    def lltm(sequence: T, weights: T, bias: Optional[T], h: T, c: T) -> Sequence[T]:
        return meaning.lltm(sequence, weights, h, c, bias)

    namespace = torch.ops.lenet_ops
    return {
        namespace.gelu.default: gelu,
        namespace.ncrelu.default: ncrelu,
        namespace.depthwise_conv2d.default: depthwise_conv2d,
        namespace.involution2d.default: involution2d,
        namespace.exp.default: exp,
        namespace.global_avg_pool2d.default: global_avg_pool2d,
        namespace.lltm_cell.default: lltm_cell,
        namespace.lltm.default: lltm,
    }


def _bare_operator(function: OnnxFunction) -> Op:
    """An operator with the signature of a function, but not its body."""
    signature = inspect.signature(function.function)
    inputs, attributes = [], []
    for item in signature.parameters.values():
        if item.annotation in _ATTRIBUTE_TYPES:
            kind, required = _ATTRIBUTE_TYPES[item.annotation], item.default is item.empty
            attributes.append(OpSchema.Attribute(item.name, kind, required=required))
        else:
            option = OpSchema.FormalParameterOption
            optional = option.Optional if item.annotation == Optional[T] else option.Single
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


# The symbolic functions. Types are set by hand: torch infers none for a domain of ours.


def _gelu_symbolic(g: Any, input: Value) -> Value:
    return g.onnxscript_op(functions(g.opset).gelu, input).setType(input.type())


@symbolic_helper.parse_args("v", "i")
def _ncrelu_symbolic(g: Any, input: Value, dim: int) -> Value:
    sizes = symbolic_helper._get_tensor_sizes(input)
    if sizes is not None and sizes[dim] is not None:
        sizes[dim] *= 2
    output = g.onnxscript_op(functions(g.opset).ncrelu, input, axis_i=dim)
    return output.setType(input.type().with_sizes(sizes))


@symbolic_helper.parse_args("v", "v", "v", "is", "is", "is")
def _depthwise_conv2d_symbolic(
    g: Any,
    input: Value,
    weight: Value,
    bias: Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    sizes = symbolic_helper._get_tensor_sizes(input)
    channels, _, *kernel = symbolic_helper._get_tensor_sizes(weight)
    attributes = _window_attributes(stride, padding, dilation)
    output = g.onnxscript_op(
        functions(g.opset).depthwise_conv2d,
        input,
        weight,
        bias,
        **{f"{name}_i": value for name, value in attributes.items()},
        group_i=channels,
    )
    spatial = [
        None if size is None else (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(sizes[2:], kernel, stride, padding, dilation, strict=True)
    ]
    return output.setType(input.type().with_sizes([*sizes[:2], *spatial]))


def _exp_symbolic(g: Any, input: Value) -> Value:
    return g.onnxscript_op(functions(g.opset).exp, input).setType(input.type())


def _global_avg_pool2d_symbolic(g: Any, input: Value) -> Value:
    sizes = symbolic_helper._get_tensor_sizes(input)
    output = g.onnxscript_op(functions(g.opset).global_avg_pool2d, input)
    return output.setType(input.type().with_sizes([*sizes[:2], 1, 1]))


@symbolic_helper.parse_args("v", "v", "is", "is", "is")
def _involution2d_symbolic(
    g: Any,
    input: Value,
    weight: Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    attributes = _window_attributes(stride, padding, dilation)
    output = g.onnxscript_op(
        functions(g.opset).involution2d,
        input,
        weight,
        **{f"{name}_i": value for name, value in attributes.items()},
    )
    sizes = symbolic_helper._get_tensor_sizes(input)
    places = symbolic_helper._get_tensor_sizes(weight)[4:]
    return output.setType(input.type().with_sizes([*sizes[:2], *places]))


def _lltm_cell_symbolic(
    g: Any, input: Value, weights: Value, bias: Value, h: Value, c: Value
) -> tuple[Value, ...]:
    outputs = g.onnxscript_op(functions(g.opset).lltm_cell, input, weights, h, c, bias, outputs=2)
    return *(y.setType(c.type()) for y in outputs), None


def _lltm_symbolic(
    g: Any, sequence: Value, weights: Value, bias: Value, h: Value, c: Value
) -> tuple[Value, ...]:
    outputs = g.onnxscript_op(functions(g.opset).lltm, sequence, weights, h, c, bias, outputs=3)
    steps, batch, _ = symbolic_helper._get_tensor_sizes(sequence)
    sizes = [steps, batch, symbolic_helper._get_tensor_sizes(c)[1]]
    all_h, *last = outputs
    return (
        all_h.setType(sequence.type().with_sizes(sizes)),
        *(y.setType(c.type()) for y in last),
        None,
    )


def _window_attributes(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> dict[str, list[int]]:
    """ONNX pads each side of each dimension: all the beginnings, then all the ends."""
    return {
        "strides": list(stride),
        "pads": [*padding, *padding],
        "dilations": list(dilation),
    }


def inline(model: ModelProto) -> ModelProto:
    """Returns the model with its functions' bodies in the place of their nodes, and simplified."""
    return optimizer.optimize(inline_local_functions(model))
