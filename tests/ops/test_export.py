"""export_onnx: both exporters, both layouts, every opset."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from ops import LLTM, DepthwiseConv2d, Involution2d, LLTMCell, MaxPool2d
from tests.ops.operators import each_exported, each_exported_case
from tests.ops.tensors import inputs, split
from tests.ops.test_onnx import Call, check, evaluate, feed, input_names, run

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from ops.export import DOMAIN, LEAST_OPSET, VERSION, export_onnx  # noqa: E402

NEWEST = onnx.defs.onnx_opset_version()
LAYOUTS = ("function", "standard")


def export(op, case, tensors, **settings):
    data, weights = split(op, tensors)
    call = Call(op, case, weights).eval()
    return export_onnx(call, tuple(data), input_names=input_names(data), **settings)


def checked(model, opset, layout):
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    domains = {"": opset, DOMAIN: VERSION} if layout == "function" else {"": opset}
    assert {item.domain: item.version for item in model.opset_import} == domains
    assert {node.domain for node in model.graph.node} <= set(domains)
    assert len(model.functions) == (layout == "function")
    return model


@each_exported_case
@pytest.mark.parametrize(
    "opsets",
    [
        (LEAST_OPSET, NEWEST),
        pytest.param(range(LEAST_OPSET, NEWEST + 1), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_opsets_match_the_operator(op, case, opsets):
    tensors = inputs(case, torch.float32)
    expected = op.function(*tensors, **case.kwargs)
    for layout, opset in product(LAYOUTS, opsets):
        model = checked(
            export(op, case, tensors, layout=layout, opset_version=opset), opset, layout
        )
        arrays = evaluate(model, feed(split(op, tensors)[0]))
        check([torch.from_numpy(np.asarray(array)) for array in arrays], expected)


@each_exported
@pytest.mark.parametrize(
    ("layout", "opset"),
    [
        ("function", 21),
        *(pytest.param(*way, marks=pytest.mark.exhaustive) for way in product(LAYOUTS, (17, 20))),
    ],
)
def test_exporters_match_the_operator(op, layout, opset):
    case = op.cases[0]
    tensors = inputs(case, torch.float32)
    expected = op.function(*tensors, **case.kwargs)
    for exporter in ("symbolic", "dynamo"):
        model = export(op, case, tensors, exporter=exporter, layout=layout, opset_version=opset)
        check(run(checked(model, opset, layout), *split(op, tensors)[0]), expected)


@pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])
def test_names_and_dynamic_axes(exporter):
    from ops import GELU, DepthwiseConv2d, NCReLU

    block = nn.Sequential(DepthwiseConv2d(4, 3, padding=1, bias=False), NCReLU(), GELU()).eval()
    model = export_onnx(
        block,
        (torch.randn(2, 4, 9, 8),),
        exporter=exporter,
        input_names=["x0"],
        output_names=["y"],
        dynamic_axes={"x0": {0: "batch", 2: "height"}},
    )
    assert {function.name for function in model.functions} == {"DepthwiseConv2d", "NCReLU", "GELU"}
    assert model.graph.output[0].name == "y"
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param or size.dim_value for size in sizes] == ["batch", 4, "height", 8]
    other = torch.randn(3, 4, 5, 8)
    check(run(model, other), block(other).detach())


@pytest.mark.parametrize(("layout", "exporter"), [("function", "symbolic"), ("standard", "dynamo")])
def test_involution_has_dynamic_sizes(layout, exporter):
    from ops import Involution2d

    net = nn.Sequential(Involution2d(4, 3, group_channels=2), nn.Conv2d(4, 2, 1)).eval()
    model = export_onnx(
        net,
        (torch.randn(2, 4, 9, 8),),
        exporter=exporter,
        layout=layout,
        input_names=["x0"],
        dynamic_axes={"x0": {0: "batch", 2: "height", 3: "width"}},
    )
    for batch in (3, 0):
        other = torch.randn(batch, 4, 6, 11)
        check(run(model, other), net(other).detach())


class LastState(nn.Module):
    """An LLTM over sequences of any batch size; returns its last state."""

    def __init__(self):
        super().__init__()
        self.layer = LLTM(5, 4)

    def forward(self, x):
        return self.layer(x)[1][0]


@pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])
@pytest.mark.parametrize("opset", [pytest.param(17, marks=pytest.mark.exhaustive), 18])
def test_fixed_number_of_steps_is_unrolled(exporter, opset):
    net = LastState().eval()
    for dynamic, unrolled in (({1: "batch"}, True), ({0: "steps", 1: "batch"}, False)):
        model = export_onnx(
            net,
            (torch.randn(3, 2, 5),),
            exporter=exporter,
            layout="standard",
            opset_version=opset,
            input_names=["x0"],
            dynamic_axes={"x0": dynamic},
        )
        counts = Counter(node.op_type for node in model.graph.node)
        assert (counts["Gemm"], counts["Scan"]) == ((3, 0) if unrolled else (0, 1))
        other = torch.randn(3 if unrolled else 7, 6, 5)
        check(run(model, other), net(other).detach())


@pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])
def test_omitted_inputs_are_not_in_the_file(exporter):
    """Expect no formal input without use and no empty trailing input: onnxslim refuses both."""
    for layer, args in (
        (DepthwiseConv2d(4, 3, bias=False), (torch.randn(2, 4, 9, 8),)),
        (LLTMCell(5, 4, bias=False), (torch.randn(2, 5),)),
    ):
        model = export_onnx(layer.eval(), args, exporter=exporter, output_names=())
        used = {name for node in model.functions[0].node for name in node.input}
        assert set(model.functions[0].input) <= used
        assert all(node.input[-1] for node in model.graph.node if node.domain == "lenet_ops")


def test_conv_without_bias_has_two_inputs():
    """Expect no empty third input, with which ONNX Runtime selects a slower kernel."""
    from ops import DepthwiseConv2d

    for bias, count in ((True, 3), (False, 2)):
        layer = DepthwiseConv2d(4, 3, bias=bias).eval()
        (function,) = export_onnx(layer, (torch.randn(1, 4, 9, 8),)).functions
        assert [len(node.input) for node in function.node] == [count]


@pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])
def test_fixed_sizes_of_involution_are_folded(exporter):
    layer = Involution2d(4, 3, group_channels=2, reduction_ratio=2).eval()
    model = export_onnx(
        layer,
        (torch.randn(2, 4, 7, 6),),
        exporter=exporter,
        layout="standard",
        input_names=["x0"],
        dynamic_axes={"x0": {0: "batch"}},
    )
    assert "Range" not in {node.op_type for node in model.graph.node}
    for batch in (1, 3):
        x = torch.randn(batch, 4, 7, 6)
        check(run(model, x), layer(x).detach())


class Reduced(nn.Module):
    def forward(self, x):
        return torch.logsumexp(x, 1)


@pytest.mark.parametrize("opset", [17, NEWEST])
def test_standard_operators_are_converted_to_the_opset(opset):
    """Export ReduceLogSumExp: `axes` is an attribute up to opset 17 and an input from 18."""
    x = torch.randn(3, 4)
    model = export_onnx(Reduced(), (x,), opset_version=opset)
    onnx.checker.check_model(model, full_check=True)
    (array,) = evaluate(model, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(np.asarray(array)), torch.logsumexp(x, 1))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"exporter": "magic"}, "exporter=magic: choose from symbolic, dynamo"),
        ({"layout": "flat"}, "layout=flat: choose from function, standard"),
        ({"opset_version": 16}, f"opset_version=16: choose from 17 to {NEWEST}"),
        ({"opset_version": NEWEST + 1}, f"choose from 17 to {NEWEST}"),
        ({"dynamic_axes": {"imput": {0: "n"}}}, "is named imput, there are input, output"),
        ({"input_names": ["a"], "output_names": ["a"]}, "output_names: a is given twice"),
        ({"input_names": ["a", "b", "a"]}, "input_names, output_names: a is given twice"),
    ],
)
def test_wrong_arguments(settings, says):
    with pytest.raises(ValueError, match=says):
        export_onnx(nn.Identity(), (torch.zeros(1),), **settings)


def test_wrong_types():
    with pytest.raises(TypeError, match="opset_version must be int, not str"):
        export_onnx(nn.Identity(), (torch.zeros(1),), opset_version="18")
    for axes in ([1], {"input": 0}, {"input": [0]}):
        with pytest.raises(TypeError, match=r"dynamic_axes must be \{input or .* got "):
            export_onnx(nn.Identity(), (torch.zeros(1),), dynamic_axes=axes)


@pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])
def test_network_of_2_gib_raises(exporter):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(torch.zeros(()).expand(2**10, 2**19))
    with pytest.raises(ValueError, match=r"has 2,147,483,648 bytes, ONNX allows fewer than"):
        export_onnx(layer, (torch.zeros(1, 2**19),), exporter=exporter)


def test_function_instead_of_module_raises():
    with pytest.raises(TypeError, match=r"export_onnx: module must be an nn\.Module, got f"):
        export_onnx(lambda x: x, (torch.ones(2),))


def test_pooling_windows_unsupported_by_onnx_runtime_raise():
    module = MaxPool2d(2, stride=3, padding=1, dilation=3, ceil_mode=True).eval()
    for exporter in ("symbolic", "dynamo"):
        with pytest.raises(Exception, match="reaches 3 pixels over the image; ONNX Runtime allows"):
            export_onnx(module, (torch.ones(1, 1, 9, 9),), exporter=exporter)


def test_ceil_mode_needs_a_fixed_size():
    axes = {"input": {2: "height"}}
    for exporter in ("symbolic", "dynamo"):
        with pytest.raises(Exception, match="with ceil_mode, ONNX needs height and width"):
            export_onnx(
                MaxPool2d(2, ceil_mode=True).eval(),
                (torch.ones(1, 1, 6, 6),),
                exporter=exporter,
                dynamic_axes=axes,
            )


def test_involution_suits_small_runtimes():
    """tinygrad gathers by one-dimensional indices only; LiteRT sums no tensor of seven axes."""
    net = Involution2d(4, 3, group_channels=2).eval()
    axes = {"input": {0: "batch"}}
    model = export_onnx(net, (torch.rand(2, 4, 6, 6),), layout="standard", dynamic_axes=axes)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    ranks = {x.name: len(x.type.tensor_type.shape.dim) for x in graph.value_info}
    ranks |= {x.name: len(x.dims) for x in graph.initializer}
    gathers = [node for node in graph.node if node.op_type == "Gather"]
    assert [ranks[node.input[1]] for node in gathers] == [1, 1]
    assert [ranks[node.input[0]] for node in graph.node if node.op_type == "ReduceSum"] == [5]
