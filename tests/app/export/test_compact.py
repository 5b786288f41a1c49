"""Reduction of the file size of int8 networks."""

import numpy as np
import onnx
import onnx.parser
import pytest

from app.config.schema import ExportConfig
from app.export.compact import compact
from app.export.export import export
from app.export.graph import build_graph
from app.export.quantize import quantize
from app.inference.onnx_runtime import open_session
from app.inference.predictor import load_torch
from tests.app.idx import random_images
from tests.app.networks import TINY

EXPORTERS = pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])


@EXPORTERS
@pytest.mark.usefixtures("short_latency_benchmark")
def test_int8_file_of_the_tiny_network_has_at_most_12_kb(make_run, exporter):
    folder = make_run(model=TINY)
    export(ExportConfig(checkpoint=str(folder), quantize="int8", exporter=exporter))
    assert (folder / "model-int8.onnx").stat().st_size <= 12_000


@EXPORTERS
def test_int8_keeps_the_names_of_inputs_outputs_and_layers(make_run, exporter):
    settings = {"preprocess": True, "postprocess": True, "exporter": exporter}
    whole = build_graph(load_torch(make_run()), ExportConfig(quantize="int8", **settings))
    graph = quantize(whole, random_images(20)).graph
    assert [value.name for value in graph.input] == ["pixels"]
    assert [value.name for value in graph.output] == ["logits", "probabilities", "class"]
    assert [node.name for node in graph.node if node.name] == [
        "features.0",
        "features.3",
        "classifier.0",
        "classifier.2",
        "classifier.4",
    ]


def test_compact_merges_equal_constants_and_drops_unused_ones():
    model = build("""
        <ir_version: 8, opset_import: ["" : 18]>
        agraph (float[N] x) => (float[N] y)
        <float two = {2}, float equal = {2}, float unused = {3}>
        { product = Mul(x, two)  y = Add(product, equal) }""")
    compact(model.graph)
    assert len(model.graph.initializer) == 1
    assert run(model).tolist() == [8]


def test_compact_keeps_the_names_of_subgraphs():
    """The branches use outer tensors, and their own tensors have short names."""
    model = build("""
        <ir_version: 8, opset_import: ["" : 18]>
        agraph (float[N] x) => (float[N] y)
        <float two = {2}, float equal = {2}, bool yes = {1}>
        {
            outer = Mul(x, two)
            chosen = If(yes) <
                then_branch = then () => (float[N] b) { a = Mul(outer, equal)  b = Add(a, two) },
                else_branch = else () => (float[N] c) { c = Add(outer, equal) }
            >
            y = Add(chosen, outer)
        }""")
    compact(model.graph)
    assert run(model).tolist() == [20]


@pytest.mark.parametrize("dilation", [1, 2])
def test_compact_removes_default_attributes_only(dilation):
    model = build(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        agraph (float[1, 1, 5, 5] x) => (float[1, 1, H, W] y)
        <float[1, 1, 2, 2] w = {{1, 2, 3, 4}}>
        {{
            y = Conv<auto_pad = "NOTSET", dilations = [{dilation}, {dilation}], group = 1,
                kernel_shape = [2, 2], pads = [0, 0, 0, 0], strides = [1, 1]>(x, w)
        }}""")
    x = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    expected = run(model, x)
    compact(model.graph)
    (node,) = model.graph.node
    assert [item.name for item in node.attribute] == ["dilations"] * (dilation > 1)
    np.testing.assert_array_equal(run(model, x), expected)


def build(text):
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model, x=(3,)):
    onnx.checker.check_model(model, full_check=True)
    return open_session(model.SerializeToString()).run(None, {"x": np.array(x, np.float32)})[0]
