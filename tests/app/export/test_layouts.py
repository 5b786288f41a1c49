"""Export layouts, and the default exporter."""

import json
from dataclasses import replace

import onnx
import pytest
import torch

from app.config.schema import ExportConfig
from app.export.export import export
from app.export.graph import exporter

pytestmark = pytest.mark.usefixtures("short_latency_benchmark")


def test_both_layouts_are_written(make_run, capsys):
    folder = make_run("ncrelu", "depthwise")
    export(ExportConfig(checkpoint=str(folder)))
    models = {path.name: onnx.load(path) for path in folder.glob("*.onnx")}
    assert sorted(models) == ["model-standard.onnx", "model.onnx"]
    assert {node.domain for node in models["model-standard.onnx"].graph.node} == {""}
    assert "lenet_ops" in {node.domain for node in models["model.onnx"].graph.node}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "model.onnx is for ONNX Runtime, model-standard.onnx for other runtimes"
    for name, layout in (("model.md", "function"), ("model-standard.md", "standard")):
        assert f"layout={layout}" in (folder / name).read_text()


def test_both_layouts_with_a_file_name(make_run, tmp_path):
    export(ExportConfig(str(make_run()), file=str(tmp_path / "x.onnx"), layout="both"))
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["x-standard.onnx", "x.onnx"]


def test_default_exporter_is_recorded(make_run):
    folder = make_run()
    export(ExportConfig(checkpoint=str(folder), layout="function"))
    metadata = {item.key: item.value for item in onnx.load(folder / "model.onnx").metadata_props}
    assert json.loads(metadata["export"])["exporter"] == "symbolic"


def test_default_exporter_without_torchscript_is_dynamo(monkeypatch):
    cfg = ExportConfig()
    assert exporter(cfg) == "symbolic"
    monkeypatch.delattr(torch.onnx, "register_custom_op_symbolic")
    assert exporter(cfg) == "dynamo"
    assert exporter(replace(cfg, exporter="symbolic")) == "symbolic"
