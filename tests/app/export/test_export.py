"""Export of trained networks: model, metadata, accuracy, errors."""

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from torch import nn

from app.config.errors import RunError, UserError
from app.config.schema import ExportConfig
from app.data.datasets import load_test_split
from app.export import export as exporter
from app.export.export import check, export
from app.export.graph import BATCH, build_graph, newest_opset
from app.inference.predictor import load_torch
from app.runs.folder import read_summary

# Runs a model with ONNX Runtime and NumPy only.
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

pytestmark = pytest.mark.usefixtures("short_latency_benchmark")


def exported(folder, name="model.onnx", **settings):
    layout = None if "quantize" in settings else "function"
    export(ExportConfig(checkpoint=str(folder), **{"layout": layout} | settings))
    return onnx.load(folder / name)


@pytest.fixture
def trained(trained_run, tmp_path):
    """Return a new folder with the checkpoint of `trained_run`."""
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    return tmp_path


def run_model(model, images):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: images})


def metadata_of(model):
    return {item.key: item.value for item in model.metadata_props}


def test_input_and_output_have_names_types_and_dynamic_batch(make_run):
    model = exported(make_run("ncrelu", "depthwise"))
    for value, name, shape in (
        (model.graph.input[0], "image", [BATCH, 1, 28, 28]),
        (model.graph.output[0], "logits", [BATCH, 10]),
    ):
        tensor = value.type.tensor_type
        assert value.name == name
        assert tensor.elem_type == onnx.TensorProto.FLOAT
        assert [size.dim_param or size.dim_value for size in tensor.shape.dim] == shape
        assert value.doc_string
    assert all(
        value.type.tensor_type.shape.dim[0].dim_param == BATCH for value in model.graph.value_info
    )


def test_metadata_names_data_classes_and_versions(trained_run, tmp_path):
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    checkpoint = load_torch(tmp_path).checkpoint
    about = metadata_of(exported(tmp_path))
    assert about["dataset"] == "digits"
    assert "fallback_from" not in about
    assert json.loads(about["classes"]) == list("0123456789")
    assert float(about["mean"]) == checkpoint.data.mean
    assert float(about["std"]) == checkpoint.data.std
    assert float(about["test_accuracy"]) == pytest.approx(
        read_summary(trained_run)["test_accuracy"]
    )
    kind = {"name": "lenet", "act": "ncrelu", "conv": "depthwise", "head": "fc"}
    assert json.loads(about["model"]) == kind
    assert {"python", "torch", "onnx"} <= json.loads(about["versions"]).keys()


def test_metadata_names_the_replaced_data_set(make_run):
    about = {
        item.key: item.value for item in exported(make_run(fallback_from="mnist")).metadata_props
    }
    assert (about["dataset"], about["fallback_from"]) == ("digits", "mnist")


def test_runs_with_onnxruntime_and_numpy_alone(trained_run, tmp_path):
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    exported(tmp_path)
    trained = load_torch(tmp_path)
    images = load_test_split("digits", "data").images
    np.save(tmp_path / "images.npy", images.numpy())
    done = subprocess.run(
        [sys.executable, "-c", CONSUMER, "model.onnx", "images.npy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    predicted = trained.logits(images).argmax(1)
    assert json.loads(done.stdout) == [str(label) for label in predicted.tolist()]


class Shifted(nn.Module):
    """A network with logits shifted by a constant."""

    def __init__(self, module, by):
        super().__init__()
        self.module, self.by = module, by

    def forward(self, input):
        return self.module(input) + self.by


def shifted(by):
    return lambda trained, cfg: build_graph(
        replace(trained, module=Shifted(trained.module, by)), cfg
    )


@pytest.mark.parametrize("by", [2e-4, float("nan")])
def test_different_logits_raise(make_run, monkeypatch, by):
    folder = make_run()
    monkeypatch.setattr(exporter, "build_graph", shifted(by))
    with pytest.raises(RunError, match="by more than 1e-05: "):
        export(ExportConfig(checkpoint=str(folder), layout="function"))
    assert [path.name for path in folder.iterdir()] == ["best.pt"]


def test_failed_export_keeps_the_earlier_file(make_run, monkeypatch):
    folder = make_run()
    exported(folder)
    before = (folder / "model.onnx").read_bytes()
    monkeypatch.setattr(exporter, "build_graph", shifted(1.0))
    with pytest.raises(RunError):
        export(ExportConfig(checkpoint=str(folder), layout="function"))
    assert (folder / "model.onnx").read_bytes() == before


def test_invalid_model_raises(make_run, monkeypatch):
    folder = make_run()

    def broken(trained, cfg):
        model = build_graph(trained, cfg)
        model.graph.node[0].op_type = "Convolve"
        return model

    monkeypatch.setattr(exporter, "build_graph", broken)
    with pytest.raises(onnx.checker.ValidationError):
        export(ExportConfig(checkpoint=str(folder), layout="function"))
    assert [path.name for path in folder.iterdir()] == ["best.pt"]


def test_check_infers_every_shape(make_run):
    model = check(build_graph(load_torch(make_run("ncrelu", "depthwise")), ExportConfig()))
    produced = {name for node in model.graph.node for name in node.output}
    known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
    assert produced == known


@pytest.mark.parametrize(
    ("exporter_name", "layout", "opset"),
    [
        *(("symbolic", *rest) for rest in product(("function", "standard"), (17, None))),
        ("dynamo", "standard", None),
    ],
)
def test_exporters_layouts_and_opsets(make_run, capsys, exporter_name, layout, opset):
    opset = opset or newest_opset()
    folder = make_run("gelu", "depthwise")
    model = exported(folder, exporter=exporter_name, layout=layout, opset=opset)
    assert "0 of 359 predictions differ" in capsys.readouterr().out
    imports = {item.domain: item.version for item in model.opset_import}
    ours = [node for node in model.graph.node if node.domain == "lenet_ops"]
    if layout == "function":
        assert imports == {"": opset, "lenet_ops": 1}
        names = {"DepthwiseConv2d", "GELU", "MaxPool2d"}
        assert {node.op_type for node in ours} == names
        assert {function.name for function in model.functions} == names
        assert {item.version for function in model.functions for item in function.opset_import} == {
            opset
        }
    else:
        assert imports == {"": opset}
        assert ours == []
        assert len(model.functions) == 0
    assert not re.search(rb"/(site-packages|app|tests)/", model.SerializeToString())


@pytest.mark.parametrize("exporter_name", ["symbolic", "dynamo"])
def test_preprocess_and_postprocess(trained, exporter_name):
    model = exported(trained, exporter=exporter_name, preprocess=True, postprocess=True)
    interface = [
        (value.name, value.type.tensor_type.elem_type)
        for value in (*model.graph.input, *model.graph.output)
    ]
    floats = onnx.TensorProto.FLOAT
    assert interface == [
        ("pixels", onnx.TensorProto.UINT8),
        ("logits", floats),
        ("probabilities", floats),
        ("class", onnx.TensorProto.INT64),
    ]
    assert all(value.doc_string for value in (*model.graph.input, *model.graph.output))
    images = load_test_split("digits", "data").images
    logits, probabilities, index = run_model(model, images.numpy())
    expected = load_torch(trained).logits(images)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(probabilities, expected.softmax(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(index, expected.argmax(1))


@pytest.mark.parametrize(
    ("settings", "name", "most"),
    [
        ({"precision": "fp16"}, "model-fp16.onnx", 0.6),
        ({"quantize": "int8", "preprocess": True, "opset": 17}, "model-int8.onnx", 0.35),
        ({"quantize": "int8", "opset": newest_opset(quantized=True)}, "model-int8.onnx", 0.35),
    ],
    ids=str,
)
def test_fp16_and_int8_keep_the_accuracy(trained, trained_run, capsys, settings, name, most):
    exported(trained)
    capsys.readouterr()
    model = exported(trained, name, **settings)
    accuracy = read_summary(trained_run)["test_accuracy"]
    printed = re.search(r"accuracy (.+)% \(fp32 in torch: (.+)%\)", capsys.readouterr().out)
    assert float(printed[2]) == pytest.approx(100 * accuracy, abs=0.01)
    assert float(printed[1]) >= 100 * accuracy - 0.3  # one of 359 images is 0.28 %
    assert (trained / name).stat().st_size < most * (trained / "model.onnx").stat().st_size
    kinds = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 4}
    assert kinds == {onnx.TensorProto.INT8 if "quantize" in settings else onnx.TensorProto.FLOAT16}
    assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_loss_of_accuracy_raises(trained, monkeypatch):
    def useless(model, images):
        model = copy.deepcopy(model)
        model.graph.initializer[0].ClearField("raw_data")
        model.graph.initializer[0].float_data.extend(
            [0.0] * np.prod(model.graph.initializer[0].dims)
        )
        return model

    monkeypatch.setattr(exporter, "quantize", useless)
    with pytest.raises(RunError, match="right predictions are lost, at most 2 may be: "):
        exported(trained, quantize="int8")
    assert not (trained / "model-int8.onnx").exists()


def test_export_is_deterministic(trained):
    contents = []
    for name in ("one.onnx", "two.onnx"):
        exported(trained, name, file=str(trained / name), quantize="int8", postprocess=True)
        contents.append((trained / name).read_bytes())
    assert contents[0] == contents[1]


def test_model_card_example_runs(trained, monkeypatch, capsys):
    folder = trained / "new" / "folder"
    for number, settings in enumerate(({}, {"preprocess": True, "postprocess": True})):
        name = f"model{number}.onnx"
        export(ExportConfig(str(trained), file=str(folder / name), layout="function", **settings))
        monkeypatch.chdir(folder)  # did not exist before
        text = Path(name).with_suffix(".md").read_text()
        assert text.startswith(f"# {name}\n\nLeNet with ncrelu and depthwise convolutions")
        assert "`NCReLU`: " in text
        for fact in ("accuracy", "parity", "latency", "throughput"):
            assert re.search(rf"^\| {fact} \| .*\d", text, re.MULTILINE)
        capsys.readouterr()
        exec(re.search(r"```python\n(.+?)```", text, re.DOTALL)[1], {})
        assert capsys.readouterr().out.strip() in list("0123456789")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"opset": 99}, f"opset=99: choose from 17 to {newest_opset()}, "),
        (
            {"opset": 99, "quantize": "int8"},
            f"opset=99: choose from 17 to {newest_opset(quantized=True)}, ",
        ),
        ({"quantize": "int8", "precision": "fp16"}, "quantize=int8: starts from float32"),
        ({"quantize": "int8", "layout": "function"}, "quantize=int8: has no functions"),
        ({"quantize": "int8", "layout": "both"}, "quantize=int8: has no functions"),
        ({"file": "model.pb"}, "file=model.pb: must end with .onnx"),
        ({"file": "/proc/a.onnx"}, "file=/proc/a.onnx: cannot be written: No such file"),
    ],
)
def test_conflicting_settings_raise(make_run, settings, says):
    folder = make_run()
    with pytest.raises(UserError) as raised:
        exported(folder, **settings)
    assert str(raised.value).startswith(says)
    assert [path.name for path in folder.iterdir()] == ["best.pt"]


def test_command_prints_no_warning(command, make_run, tmp_path):
    folder = make_run("gelu", "depthwise")
    done = command("app.export_onnx", f"outputs={folder.parents[1]}")
    assert (done.returncode, done.stderr) == (0, f"using {folder / 'best.pt'}\n")
    files = [line for line in done.stdout.splitlines() if line.startswith("wrote ")]
    names = ("model.onnx", "model.md", "model-standard.onnx", "model-standard.md")
    assert files == [f"wrote {folder / name}" for name in names]
    assert list((tmp_path / "here").iterdir()) == []


def test_export_without_run_raises():
    with pytest.raises(UserError, match=r"^no run under nowhere/"):
        export(ExportConfig(outputs="nowhere"))


@pytest.mark.parametrize("step", ["build_graph", "quantize", "compare", "write_card"])
def test_programming_errors_keep_their_traceback(make_run, monkeypatch, step):
    folder = make_run()

    def mistake(*args, **kwargs):
        raise ValueError("a mistake of the program")

    monkeypatch.setattr(exporter, step, mistake)
    with pytest.raises(ValueError, match="a mistake of the program"):
        export(ExportConfig(checkpoint=str(folder), quantize="int8"))


def test_export_loads_the_checkpoint_once(make_run, monkeypatch):
    folder, calls = make_run("gelu", "depthwise"), Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for target in ("app.runs.checkpoint.build_model", "torch.load"):
        module, _, name = target.rpartition(".")
        function = getattr(sys.modules[module], name)
        monkeypatch.setattr(target, counted(name, function))
    exported(folder)
    assert calls == {"build_model": 1, "load": 1}
