"""Exported files in ONNX Runtime: logits, metadata, errors."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from app.config.errors import UserError
from app.config.schema import ExportConfig, LLTMConfig
from app.export.export import export
from app.export.graph import build_graph, newest_opset
from app.inference.onnx_file import DIGEST
from app.inference.onnx_runtime import BATCH_SIZE, RUNTIME, load_onnx, open_session
from app.inference.predictor import load_predictor, load_torch
from tests.app.idx import random_images

pytestmark = pytest.mark.usefixtures("short_latency_benchmark")


@pytest.fixture(scope="module")
def kept():
    """Return a cache for the exported file of this module."""
    return {}


@pytest.fixture
def exported(make_run, kept):
    """Return a run folder with a model.onnx."""
    folder = make_run("gelu", "depthwise", classes=list("abcdefghij"), fallback_from="mnist")
    if not kept:
        export(ExportConfig(checkpoint=str(folder), layout="function"))
        kept["content"] = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(kept["content"])
    return folder


@pytest.mark.parametrize("preprocess", [False, True])
def test_logits_equal_torch(make_run, preprocess):
    folder = make_run("ncrelu", "depthwise")
    settings = {"preprocess": preprocess, "postprocess": preprocess}
    export(ExportConfig(checkpoint=str(folder), layout="function", **settings))
    theirs = load_torch(folder).logits
    ours = load_onnx(folder).logits
    for count in (1, BATCH_SIZE + 1):
        images = random_images(count)
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


def test_predictor_reads_metadata(exported):
    outputs = str(exported.parents[1])
    for checkpoint in (None, str(exported), str(exported / "model.onnx")):
        network = load_predictor(checkpoint, outputs, "onnx")
        assert network.folder == exported
        assert (network.data.name, network.data.fallback_from) == ("digits", "mnist")
        assert network.data.classes == list("abcdefghij")


@pytest.mark.filterwarnings("error", "ignore::DeprecationWarning")
@pytest.mark.parametrize("layout", ["function", "standard"])
def test_exporter_and_onnx_runtime_print_no_warning(make_run, capfd, layout):
    trained = load_torch(make_run(model=LLTMConfig()))
    content = build_graph(trained, ExportConfig(layout=layout)).SerializeToString()
    onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    assert capfd.readouterr() == ("", "")


def test_newest_opset_is_the_limit_of_onnx_runtime():
    def run(version):
        value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1, 28, 28])
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 28, 28])
        graph = helper.make_graph(
            [helper.make_node("Relu", ["image"], ["logits"])], "g", [image], [value]
        )
        opset = helper.make_opsetid("", version)
        model = helper.make_model(graph, opset_imports=[opset])
        model.ir_version = helper.find_min_ir_version_for([opset])
        session = open_session(model.SerializeToString())
        return session.run(None, {"image": np.zeros((1, 1, 28, 28), np.float32)})[0]

    assert run(newest_opset()).shape == (1, 1, 28, 28)
    with pytest.raises(Exception, match="opset"):
        run(newest_opset() + 1)


def unknown_operator(model):
    del model.functions[:]


def newer_opset(model):
    model.opset_import[0].version = newest_opset() + 1


def newer_format(model):
    model.ir_version = 99


def foreign(model):
    del model.metadata_props[:]


def set_metadata(key, value):
    def change(model):
        about = {item.key: item.value for item in model.metadata_props}
        helper.set_model_props(model, about | {key: value})

    return change


def without_digest(model):
    kept = [item for item in model.metadata_props if item.key != DIGEST]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (unknown_operator, "Fatal error: lenet_ops:"),
        (newer_opset, "till opset {newest}"),
        (newer_format, "Unsupported model IR version: 99"),
        (foreign, "not a network of `python -m app.export_onnx`: metadata.dataset is missing"),
        (set_metadata("classes", "["), "metadata.classes=[: Invalid JSON: "),
        (set_metadata("classes", "[]"), "metadata.classes=[]: List should have at least 10 items"),
        (set_metadata("classes", "[0, 1]"), "metadata.classes.0=0: Input should be a valid string"),
        (set_metadata("dataset", "cifar10"), "metadata.dataset=cifar10: Input should be 'mnist'"),
        (set_metadata("dataset", "\x1b[2J"), r"metadata.dataset=\x1b[2J: Input should be"),
        (set_metadata("std", "0"), "metadata.std=0: Input should be greater than 0"),
        (set_metadata("std", "nan"), "metadata.std=nan: Input should be a finite number"),
        (set_metadata("mean", "x"), "metadata.mean=x: Input should be a valid number"),
    ],
)
def test_unusable_model_raises(exported, change, says):
    path = exported / "model.onnx"
    model = onnx.load(path)
    without_digest(model)
    change(model)
    onnx.save(model, path)
    with pytest.raises(UserError) as raised:
        load_onnx(path)
    message = str(raised.value)
    assert message.startswith(f"checkpoint={path}: {RUNTIME} cannot load it: ")
    assert says.format(newest=newest_opset()) in message
    assert "\n" not in message


@pytest.mark.parametrize("damage", ["empty", "text", "half", "not utf-8"])
def test_damaged_file_raises(exported, damage, capfd):
    path = exported / "model.onnx"
    model = onnx.load(path)
    without_digest(model)
    whole = model.SerializeToString()
    contents = {
        "empty": b"",
        "text": b"hello",
        "half": whole[: len(whole) // 2],
        "not utf-8": whole.replace(b"MaxPool", b"\xa0axPool"),
    }
    path.write_bytes(contents[damage])
    with pytest.raises(UserError) as raised:
        load_onnx(path)
    assert str(raised.value).startswith(f"checkpoint={path}: {RUNTIME} cannot load it: ")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "settings",
    [{"layout": "function"}, {"layout": "standard"}, {"precision": "fp16"}, {"quantize": "int8"}],
)
def test_flipped_byte_raises(make_run, settings):
    folder = make_run(head="gap")
    path = folder / "file.onnx"
    export(ExportConfig(checkpoint=str(folder), file=str(path), **settings))
    whole, images = path.read_bytes(), random_images(20)
    expected = load_onnx(path).logits(images)
    names = 0
    for position in range(0, len(whole), len(whole) // 150):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            found = load_onnx(path).logits(images)
        except UserError as error:
            names += "damaged" in str(error)
        else:  # in the digest's key
            assert torch.equal(found, expected)
    assert names > 100


def test_digest_is_of_the_file_and_may_be_removed(exported):
    path = exported / "model.onnx"
    expected = load_onnx(path).logits(random_images(3))
    model = onnx.load(path)
    model.doc_string = "changed"
    onnx.save(model, path)
    with pytest.raises(UserError) as raised:
        load_onnx(path)
    assert str(raised.value) == (
        f"checkpoint={path}: its digest differs, so it is damaged: "
        "export it again, or remove its metadata 'digest' after a change"
    )
    without_digest(model)
    onnx.save(model, path)
    assert torch.equal(load_onnx(path).logits(random_images(3)), expected)


def test_failed_run_names_the_file(exported, monkeypatch):
    network = load_onnx(exported / "model.onnx")
    monkeypatch.setattr(network, "normalize", lambda images: images)  # uint8 instead of float32
    with pytest.raises(UserError) as raised:
        network.logits(random_images(1))
    assert str(raised.value).startswith(f"checkpoint={exported / 'model.onnx'}: {RUNTIME} cannot")


def test_threads_open_sessions_one_after_another(exported, monkeypatch):
    """Replacing sys.stdout, as opening does, would otherwise leave it replaced."""
    stdout, active, most = sys.stdout, [], []

    class Session:
        def __init__(self, *arguments, **options):
            active.append(self)
            most.append(len(active))
            time.sleep(0.02)
            active.remove(self)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_session, [b""] * 8))
    assert max(most) == 1
    assert sys.stdout is stdout


def test_missing_file_or_device_raises(tmp_path, exported):
    for checkpoint, device, says in (
        (None, "cpu", f"no run under {tmp_path}/none/ has a model.onnx: export one with `python"),
        ("none.onnx", "cpu", "checkpoint=none.onnx: no such file"),
        ("app", "cpu", "checkpoint=app: no model.onnx in this folder, export one with `python"),
        (
            str(tmp_path),
            "cpu",
            f"no model.onnx in this folder, did you mean checkpoint={exported}?",
        ),
        (str(exported / "best.pt"), "cpu", "best.pt: a checkpoint, export it first with `python"),
        (str(exported), "cuda:7", "device=cuda:7: this ONNX Runtime has no CUDA, choose from auto"),
    ):
        with pytest.raises(UserError) as raised:
            load_predictor(checkpoint, f"{tmp_path}/none", "onnx", device)
        assert says in str(raised.value)


def test_unusable_gpu_raises(monkeypatch, exported):
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    content = (exported / "model.onnx").read_bytes()
    session = open_session(content)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: session)
    assert open_session(content, "auto") is session
    with pytest.raises(UserError, match="device=cuda:0: ONNX Runtime cannot use it"):
        open_session(content, "cuda:0")
