"""Export of every kind of network."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from app.config.errors import RunError
from app.config.schema import LLTMConfig
from app.export import export as exporter
from app.export.graph import BATCH, build_graph
from app.inference.onnx_runtime import load_onnx
from app.inference.predictor import load_torch
from tests.app.export.test_export import exported
from tests.app.networks import TINY

variants = pytest.mark.parametrize(
    ("act", "conv", "head"),
    [
        ("relu", "standard", "fc"),
        ("gelu", "depthwise", "fc"),
        ("ncrelu", "depthwise", "gap"),
        ("relu", "involution", "fc"),
    ],
)

pytestmark = pytest.mark.usefixtures("short_latency_benchmark")


@variants
def test_every_lenet(make_run, capsys, act, conv, head):
    folder = make_run(act, conv, head)
    model = exported(folder)
    output = capsys.readouterr()
    assert "0 of 359 predictions differ" in output.out
    assert output.err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "model.md", "model.onnx"]
    ours = [node.op_type for node in model.graph.node if node.domain == "lenet_ops"]
    layers = 4 if head == "fc" else 3
    expected = {"relu": [], "gelu": ["GELU"] * layers, "ncrelu": ["NCReLU"] * layers}[act]
    operator = {"standard": [], "depthwise": ["DepthwiseConv2d"], "involution": ["Involution2d"]}
    expected = expected + operator[conv] * (2 if head == "fc" else 3)
    expected = expected + ["GlobalAvgPool2d"] * (head == "gap") + ["MaxPool2d"] * 2
    assert sorted(ours) == sorted(expected)
    assert {function.name for function in model.functions} == set(ours)


@pytest.mark.parametrize("exporter", ["symbolic", "dynamo"])
def test_lltm_network(make_run, capsys, exporter):
    model = exported(make_run(model=LLTMConfig()), exporter=exporter)
    assert "0 of 359 predictions differ" in capsys.readouterr().out
    assert [node.op_type for node in model.graph.node if node.domain == "lenet_ops"] == ["LLTM"]


@pytest.mark.parametrize(
    ("conv", "settings"),
    [
        ("depthwise", {}),
        ("depthwise", {"exporter": "dynamo", "preprocess": True}),
        ("involution", {"layout": "standard"}),
    ],
)
def test_gap_networks_accept_any_size(make_run, conv, settings):
    folder = make_run("gelu", conv, "gap")
    check_any_size(folder, **settings)


@pytest.mark.parametrize("settings", [{}, {"exporter": "dynamo"}, {"layout": "standard"}])
def test_tiny_network_takes_any_size(make_run, settings):
    check_any_size(make_run(model=TINY), **settings)


def check_any_size(folder, **settings):
    model = exported(folder, **settings)
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param or size.dim_value for size in sizes] == [BATCH, 1, "height", "width"]
    ours, theirs = load_onnx(folder), load_torch(folder)
    assert ours.any_size and theirs.any_size
    for size in ((12, 12), (28, 28), (45, 70)):
        images = torch.randint(0, 256, (3, 1, *size), dtype=torch.uint8)
        torch.testing.assert_close(ours.logits(images), theirs.logits(images), rtol=1e-4, atol=1e-5)
    assert "any size" in (folder / "model.md").read_text()


def test_difference_at_another_size_raises(make_run, monkeypatch):
    class Forgetful(nn.Module):
        """Return wrong logits for sizes other than 28x28."""

        def forward(self, x):
            return x.sum((2, 3), keepdim=True) / 25

    def build(trained, cfg):
        trained = replace(trained, module=copy.deepcopy(trained.module))
        trained.module.classifier[3] = Forgetful()
        return build_graph(trained, cfg)

    monkeypatch.setattr(exporter, "build_graph", build)
    with pytest.raises(RunError, match="by more than"):
        exported(make_run(head="gap"))
