import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from app import exporter
from app.config import ExportConfig
from app.errors import RunError, UserError
from app.exporter import BATCH, INPUT, OUTPUT, check, convert, export
from app.inference import load_test_split, load_trained, torch_runner

variants = pytest.mark.parametrize(
    ("act", "conv"),
    [(act, conv) for act in ("relu", "gelu", "ncrelu") for conv in ("standard", "depthwise")],
)

# Only what a consumer has: the two packages, and not a module of this project's or of torch's.
CONSUMER = """
import sys
sys.modules |= dict.fromkeys(("torch", "onnx", "onnxscript", "ops", "app"))  # None: no import
import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
pixels = np.load(sys.argv[2])
images = ((pixels / 255 - float(about["mean"])) / float(about["std"])).astype(np.float32)
(logits,) = session.run(["logits"], {"image": images})
classes = json.loads(about["classes"])
print(json.dumps([classes[index] for index in logits.argmax(1)]))
"""


def exported(folder):
    export(ExportConfig(checkpoint=str(folder)))
    return onnx.load(folder / "model.onnx")


def metadata_of(model):
    return {item.key: item.value for item in model.metadata_props}


@variants
def test_every_network_is_exported_and_checked(make_run, capsys, act, conv):
    folder = make_run(act, conv)
    model = exported(folder)
    output = capsys.readouterr()
    assert "0 of 359 predictions differ" in output.out
    assert output.err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "model.onnx"]
    ours = [node.op_type for node in model.graph.node if node.domain == "lenet_ops"]
    expected = {"relu": [], "gelu": ["GELU"] * 4, "ncrelu": ["NCReLU"] * 4}[act]
    expected = expected + ["DepthwiseConv2d"] * (2 if conv == "depthwise" else 0)
    assert sorted(ours) == sorted(expected)
    assert {function.name for function in model.functions} == set(ours)


def test_the_interface(make_run):
    model = exported(make_run("ncrelu", "depthwise"))
    for value, name, shape in (
        (model.graph.input[0], INPUT, [BATCH, 1, 28, 28]),
        (model.graph.output[0], OUTPUT, [BATCH, 10]),
    ):
        tensor = value.type.tensor_type
        assert value.name == name
        assert tensor.elem_type == onnx.TensorProto.FLOAT
        assert [size.dim_param or size.dim_value for size in tensor.shape.dim] == shape
        assert value.doc_string
    assert all(
        value.type.tensor_type.shape.dim[0].dim_param == BATCH for value in model.graph.value_info
    )


def test_metadata(trained_run, tmp_path):
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    checkpoint = load_trained(str(tmp_path), "").checkpoint
    about = metadata_of(exported(tmp_path))
    assert about["dataset"] == "digits"
    assert "fallback_from" not in about
    assert json.loads(about["classes"]) == list("0123456789")
    assert float(about["mean"]) == checkpoint.data["mean"]
    assert float(about["std"]) == checkpoint.data["std"]
    assert float(about["test_accuracy"]) == pytest.approx(checkpoint.metrics["test_accuracy"])
    assert json.loads(about["model"]) == {"act": "ncrelu", "conv": "depthwise"}
    assert {"python", "torch", "onnx"} <= json.loads(about["versions"]).keys()


def test_metadata_names_the_data_set_that_was_replaced(make_run):
    about = {
        item.key: item.value for item in exported(make_run(fallback_from="mnist")).metadata_props
    }
    assert (about["dataset"], about["fallback_from"]) == ("digits", "mnist")


def test_runs_with_onnxruntime_and_numpy_alone(trained_run, tmp_path):
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    exported(tmp_path)
    trained = load_trained(str(tmp_path), "")
    images = load_test_split(trained.checkpoint, "").images
    np.save(tmp_path / "images.npy", images.numpy())
    done = subprocess.run(
        [sys.executable, "-c", CONSUMER, "model.onnx", "images.npy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    predicted = torch_runner(trained, torch.device("cpu"))(images).argmax(1)
    assert json.loads(done.stdout) == [str(label) for label in predicted.tolist()]


class Shifted(nn.Module):
    """A network that is not quite the given one."""

    def __init__(self, module, by):
        super().__init__()
        self.module, self.by = module, by

    def forward(self, input):
        return self.module(input) + self.by


@pytest.mark.parametrize("by", [2e-4, float("nan")])
def test_a_wrong_model_is_rejected(make_run, monkeypatch, by):
    folder = make_run()
    monkeypatch.setattr(exporter, "convert", lambda module: convert(Shifted(module, by)))
    with pytest.raises(RunError, match=r"differ by more than 0\.0001: .* kept as .*\.rejected$"):
        export(ExportConfig(checkpoint=str(folder)))
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "model.onnx.rejected"]
    onnx.load(folder / "model.onnx.rejected")
    monkeypatch.undo()
    exported(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "model.onnx"]


def test_a_rejected_model_does_not_touch_an_earlier_one(make_run, monkeypatch):
    folder = make_run()
    exported(folder)
    before = (folder / "model.onnx").read_bytes()
    monkeypatch.setattr(exporter, "convert", lambda module: convert(Shifted(module, 1.0)))
    with pytest.raises(RunError):
        export(ExportConfig(checkpoint=str(folder)))
    assert (folder / "model.onnx").read_bytes() == before


def test_an_invalid_model_is_rejected(make_run, monkeypatch):
    folder = make_run()

    def broken(module):
        model = convert(module)
        model.graph.node[0].op_type = "Convolve"
        return model

    monkeypatch.setattr(exporter, "convert", broken)
    with pytest.raises(RunError, match="kept as"):
        export(ExportConfig(checkpoint=str(folder)))
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "model.onnx.rejected"]


def test_check_infers_every_shape(make_run):
    model = check(convert(load_trained(str(make_run("ncrelu", "depthwise")), "").module))
    produced = {name for node in model.graph.node for name in node.output}
    known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    assert produced == known


def test_wrong_usage(tmp_path):
    (tmp_path / "half.pt").write_bytes(b"PK\x03\x04 half a checkpoint")
    for cfg in (
        ExportConfig(outputs=str(tmp_path)),
        ExportConfig(checkpoint=str(tmp_path / "half.pt")),
    ):
        with pytest.raises(UserError):
            export(cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["half.pt"]


def test_the_command_shows_no_warning(command, make_run, tmp_path):
    folder = make_run("gelu", "depthwise")
    done = command("app.export_onnx", f"outputs={folder.parents[1]}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"wrote {folder / 'model.onnx'}"
    wrong = command("app.export_onnx", "outputs=nowhere")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: no run under nowhere/")
    assert list((tmp_path / "here").iterdir()) == []
