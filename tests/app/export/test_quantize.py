from collections import Counter

import onnx
import onnxruntime
import pytest
import torch

from app.config.schema import ExportConfig, LLTMConfig
from app.data.transforms import normalize
from app.export import export as exporter
from app.export.export import export
from app.export.graph import build_graph
from app.export.quantize import quantize
from app.inference.onnx_runtime import open_session
from app.inference.predictor import load_data, load_torch
from tests.app.idx import random_images


def test_calibration_takes_any_number_of_images(make_run, monkeypatch):
    monkeypatch.setattr("app.export.quantize.BATCH_SIZE", 8)
    whole = build_graph(load_torch(make_run()), ExportConfig(quantize="int8"))
    for count in (5, 8, 20):
        images = normalize(random_images(count), 0.2, 0.3)
        assert quantize(whole, images).ByteSize() < 0.35 * whole.ByteSize()


def test_int8_keeps_recurrent_weights(make_run):
    cfg = ExportConfig(quantize="int8")
    whole = build_graph(load_torch(make_run(model=LLTMConfig())), cfg)
    images = normalize(random_images(20), 0.2, 0.3)
    quantized = quantize(whole, images)
    assert quantized.ByteSize() < 0.35 * whole.ByteSize()
    logits, expected = (
        open_session(model.SerializeToString()).run(None, {"image": images.numpy()})[0]
        for model in (quantized, whole)
    )
    assert 0 < abs(logits - expected).max() < 0.05 * abs(expected).max()


def test_int8_model_is_smaller_and_runs_int8_kernels(make_run, tmp_path):
    images = normalize(random_images(20), 0.2, 0.3)
    for head, most in (("fc", 0.32), ("gap", 0.75)):
        trained = load_torch(make_run("relu", "depthwise", head))
        whole = build_graph(trained, ExportConfig(quantize="int8"))
        quantized = quantize(whole, images)
        assert quantized.ByteSize() < most * whole.ByteSize()
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 3  # warns that the optimised file is machine-specific
        onnxruntime.InferenceSession(quantized.SerializeToString(), options)
        left = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
        was = Counter(node.op_type for node in whole.graph.node)
        assert (left["QLinearConv"], left["QGemm"]) == (was["Conv"], was["Gemm"])


@pytest.mark.parametrize("opset", [20, 21])
def test_int8_involutions_run_in_every_opset(make_run, opset):
    cfg = ExportConfig(quantize="int8", opset=opset)
    images = normalize(random_images(20), 0.2, 0.3)
    whole = build_graph(load_torch(make_run("relu", "involution")), cfg)
    session = open_session(quantize(whole, images).SerializeToString())
    assert session.run(None, {"image": images.numpy()})[0].shape == (20, 10)


@pytest.mark.usefixtures("short_latency_benchmark")
def test_int8_accepts_any_number_of_validation_images(make_run):
    """Calibrate on 300 images: the calibrator needs batches of equal size, and 250 leave 50."""
    export(ExportConfig(checkpoint=str(make_run(val_size=300)), quantize="int8"))


@pytest.mark.usefixtures("short_latency_benchmark")
@pytest.mark.parametrize("preprocess", [False, True])
def test_int8_is_calibrated_on_validation_images(make_run, monkeypatch, preprocess):
    folder, seen = make_run(val_size=40), []

    def record(model, images):
        seen.append(images)
        return model

    monkeypatch.setattr(exporter, "quantize", record)
    export(ExportConfig(checkpoint=str(folder), quantize="int8", preprocess=preprocess))
    original = load_torch(folder)
    expected = load_data(original.checkpoint, "data").val.images
    if not preprocess:
        expected = (expected / 255 - 0.2) / 0.3
    (images,) = seen
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
