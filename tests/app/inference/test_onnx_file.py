"""Foreign and hostile ONNX files with the metadata of an export."""

import json
import time
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import app.inference.onnx_runtime
from app.config.errors import UserError
from app.inference.onnx_file import DOMAIN, MAX_NODES
from app.inference.onnx_runtime import load_onnx
from ops import export
from tests.app.idx import random_images

CLASSES = 10
METADATA = {
    "dataset": "digits",
    "classes": json.dumps(list("0123456789")),
    "mean": "0.1",
    "std": "0.3",
}
IMAGE = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 28, 28])
LOGITS = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])
FLATTEN = helper.make_node("Flatten", ["image"], ["flat"])
WEIGHTS = numpy_helper.from_array(np.ones((784, CLASSES), np.float32), "weights")
LINEAR = [FLATTEN, helper.make_node("MatMul", ["flat", "weights"], ["y"])]
OURS = helper.make_opsetid(DOMAIN, 1)


def save(path, nodes, inputs=(IMAGE,), outputs=(LOGITS,), constants=(), functions=(), domain=OURS):
    graph = helper.make_graph(nodes, "g", inputs, outputs, [WEIGHTS, *constants])
    opsets = [helper.make_opsetid("", 18), *([domain] if functions else [])]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)
    helper.set_model_props(model, METADATA)
    onnx.save(model, path)
    return path


def linear(*more):
    """Return the nodes of a linear network, followed by others from "y" to "logits"."""
    return [*LINEAR, *(more or [helper.make_node("Identity", ["y"], ["logits"])])]


def constant(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def value(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, shape)


@pytest.fixture
def fails(tmp_path):
    """Return a function that asserts that a file cannot be loaded and returns the reason."""

    def load(*arguments, **options):
        path = save(tmp_path / "model.onnx", *arguments, **options)
        with pytest.raises(UserError) as raised:
            load_onnx(path)
        message = str(raised.value)
        assert message.startswith(f"checkpoint={path}: ")
        assert "\n" not in message
        return message

    return load


def test_linear_network_loads(tmp_path):
    path = save(tmp_path / "model.onnx", linear())
    assert load_onnx(path).logits(random_images(3)).shape == (3, CLASSES)


def test_domain_is_that_of_the_exporter():
    assert DOMAIN == export.DOMAIN


@pytest.mark.parametrize(
    "inputs",
    [
        [value("image", TensorProto.DOUBLE, "batch", 1, 28, 28)],
        [value("image", TensorProto.STRING, "batch", 1, 28, 28)],
        [value("image", TensorProto.FLOAT, "batch", 784)],
        [value("image", TensorProto.FLOAT, "batch", 3, 28, 28)],
        [value("image", TensorProto.FLOAT, "batch", 1, 32, 32)],
        [value("image", TensorProto.FLOAT, "batch", 1, 28, "width")],
        [value("image", TensorProto.FLOAT, 1, 1, 28, 28)],
        [IMAGE, value("other", TensorProto.FLOAT, "batch", 1, 28, 28)],
        [],
    ],
)
def test_foreign_inputs_raise(fails, inputs):
    image = inputs[0].name if inputs else "constant"
    nodes = [
        helper.make_node("Cast", [image], ["x"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Expand", ["largest", "shape"], ["logits"]),
    ]
    constants = [constant("shape", 1, CLASSES), constant("constant", 1)]
    reason = fails(nodes, inputs, constants=constants)
    assert "not a network of `python -m app.export_onnx`: its inputs are " in reason


def cast(kind):
    return linear(helper.make_node("Cast", ["y"], ["logits"], to=kind))


@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        (cast(TensorProto.INT64), value("logits", TensorProto.INT64, "batch", CLASSES)),
        (cast(TensorProto.STRING), value("logits", TensorProto.STRING, "batch", CLASSES)),
        (cast(TensorProto.DOUBLE), value("logits", TensorProto.DOUBLE, "batch", CLASSES)),
        (
            linear(helper.make_node("Unsqueeze", ["y", "axis"], ["logits"])),
            value("logits", TensorProto.FLOAT, "batch", CLASSES, 1),
        ),
        (
            linear(helper.make_node("Concat", ["y", "y"], ["logits"], axis=1)),
            value("logits", TensorProto.FLOAT, "batch", 2 * CLASSES),
        ),
        (linear(helper.make_node("Identity", ["y"], ["scores"])), value("scores", 1, None, None)),
    ],
)
def test_foreign_outputs_raise(fails, nodes, output):
    reason = fails(nodes, outputs=[output], constants=[constant("axis", 2)])
    assert "not a network of `python -m app.export_onnx`: its output logits is " in reason


def test_undeclared_shape_of_the_output_raises(fails):
    nodes = linear(helper.make_node("Concat", ["y", "y"], ["logits"], axis=0))
    reason = fails(nodes, outputs=[value("logits", TensorProto.FLOAT, None, None)])
    assert "its output logits has the shape [2, 10]" in reason


def test_nan_logits_raise(tmp_path):
    nodes = linear(helper.make_node("Sqrt", ["negative"], ["nan"]))
    nodes.append(helper.make_node("Add", ["y", "nan"], ["logits"]))
    negative = numpy_helper.from_array(np.float32(-1), "negative")
    network = load_onnx(save(tmp_path / "model.onnx", nodes, constants=[negative]))
    with pytest.raises(UserError, match="the network's outputs are not finite numbers"):
        network.logits(random_images(1))


def doubling_functions(levels):
    """Return functions that each call the one before twice."""
    names, opsets = ["in"], [helper.make_opsetid("", 18), OURS]
    node = helper.make_node("Neg", names, ["out"])
    functions = [helper.make_function(DOMAIN, "F0", names, ["out"], [node], opsets)]
    for level in range(1, levels):
        calls = [
            helper.make_node(f"F{level - 1}", [a], [b], domain=DOMAIN)
            for a, b in (("in", "between"), ("between", "out"))
        ]
        functions.append(helper.make_function(DOMAIN, f"F{level}", names, ["out"], calls, opsets))
    return functions


def test_nested_functions_raise(fails):
    call = helper.make_node("F39", ["y"], ["logits"], domain=DOMAIN)
    reason = fails(linear(call), functions=doubling_functions(40))
    assert "it defines a function with operators that are not standard" in reason


def test_functions_of_another_domain_raise(fails):
    opset = helper.make_opsetid("other", 1)
    neg = helper.make_node("Neg", ["in"], ["out"])
    function = helper.make_function("other", "F", ["in"], ["out"], [neg], [OURS])
    call = helper.make_node("F", ["y"], ["logits"], domain="other")
    reason = fails(linear(call), functions=[function], domain=opset)
    assert "it defines functions of the domain 'other', not of lenet_ops" in reason


def test_too_many_nodes_raise(fails):
    names = ["y", *(f"y{index}" for index in range(MAX_NODES)), "logits"]
    nodes = [helper.make_node("Neg", [before], [after]) for before, after in pairwise(names)]
    assert f"it has more than {MAX_NODES:,} nodes" in fails(linear(*nodes))


@pytest.fixture
def external(tmp_path, monkeypatch):
    """Return a tensor of ten zeros in another file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(bytes(40))
    tensor = TensorProto(name="bias", data_type=1, dims=[10], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    return tensor


def function_with_default(name, default):
    """Return a function, and a call, with an attribute `name` that has the value `default`."""
    opsets = [helper.make_opsetid("", 18)]
    node = helper.make_node("Identity", ["in"], ["out"])
    attribute = helper.make_attribute(name, default)
    function = helper.make_function(
        DOMAIN, "F", ["in"], ["out"], [node], opsets, attribute_protos=[attribute]
    )
    return function, helper.make_node("F", ["y"], ["logits"], domain=DOMAIN)


def test_nodes_in_default_attributes_count(fails):
    nodes = [helper.make_node("Neg", ["x"], ["z"]) for _ in range(MAX_NODES)]
    function, call = function_with_default("body", helper.make_graph(nodes, "body", [], []))
    assert f"it has more than {MAX_NODES:,} nodes" in fails(linear(call), functions=[function])


def test_default_attribute_in_another_file_raises(fails, external):
    function, call = function_with_default("value", external)
    assert "it has weights in another file" in fails(linear(call), functions=[function])


def test_weights_in_another_file_raise(fails, external):
    add = helper.make_node("Add", ["y", "bias"], ["logits"])
    assert "it has weights in another file" in fails(linear(add), constants=[external])


def test_large_file_raises(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="it has more than 268,435,456 bytes"):
        load_onnx(path)


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ([helper.make_node("ConstantOfShape", ["s"], ["z"])], [constant("s", 2**37)]),
        ([helper.make_node("Range", ["a", "b", "c"], ["z"])], "range"),
        pytest.param(  # each node doubles a constant, which constant folding would compute
            [helper.make_node("Concat", [f"z{i}"] * 2, [f"z{i + 1}"], axis=0) for i in range(25)]
            + [helper.make_node("Identity", ["z25"], ["z"])],
            [constant("z0", *range(1024))],
            marks=pytest.mark.exhaustive,  # takes 4 GB
        ),
    ],
)
def test_large_tensors_raise(fails, nodes, constants):
    if constants == "range":
        limits = {"a": 0, "b": 2**37, "c": 1}
        constants = [numpy_helper.from_array(np.int64(x), name) for name, x in limits.items()]
    nodes = [
        *nodes,
        helper.make_node("Cast", ["z"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["float"], ["largest"], keepdims=0),
        helper.make_node("Add", ["y", "largest"], ["logits"]),
    ]
    start = time.perf_counter()
    assert "cannot load it" in fails(linear(*nodes), constants=constants)
    assert time.perf_counter() - start < 20


def test_endless_loop_raises(fails, monkeypatch):
    monkeypatch.setattr(app.inference.onnx_runtime, "OPEN_SECONDS", 1.0)
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Neg", ["a"], ["b"])],
        "body",
        [value("i", TensorProto.INT64), value("go", TensorProto.BOOL), value("a", 1, None, None)],
        [value("on", TensorProto.BOOL), value("b", 1, None, None)],
    )
    loop = helper.make_node("Loop", ["count", "true", "y"], ["logits"], body=body)
    true = numpy_helper.from_array(np.array(True), "true")
    count = numpy_helper.from_array(np.int64(2**60), "count")
    assert "it takes more than 1 s" in fails(linear(loop), constants=[true, count])
