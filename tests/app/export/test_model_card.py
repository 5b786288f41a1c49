from types import SimpleNamespace

import pytest

from app.config.schema import ExportConfig, LeNetConfig, LLTMConfig, SeparableConfig
from app.export import model_card
from app.export.graph import build_graph
from app.export.parity import Parity
from app.inference.predictor import load_torch

WITH_GELU = "OpenVINO (gelu: workaround in docs/runtimes.md)"
ONNX_RUNTIME = "ONNX Runtime, onnxruntime-web"


@pytest.fixture
def card(make_run, monkeypatch):
    """Return a card with simulated times: 250 µs for 1 image on 1 thread, 0.5 s for 1,024."""
    clock, seconds = [0.0], {(1, 1): 250e-6, (1024, 0): 0.5}

    def open_session(content, device="cpu", threads=0):
        def run(outputs, feed):
            clock[0] += seconds[len(feed["image"]), threads]

        image = SimpleNamespace(name="image", type="tensor(float)")
        return SimpleNamespace(get_inputs=lambda: [image], run=run)

    monkeypatch.setattr(model_card, "open_session", open_session)
    monkeypatch.setattr(model_card.time, "perf_counter", lambda: clock[0])
    original, cfg = load_torch(make_run("gelu")), ExportConfig()
    content = build_graph(original, cfg).SerializeToString()
    parity = Parity(10_000, 1e-6, 12.5, differing=3, right=9900, original_right=9901)
    return model_card.write_card("model.onnx", content, original, cfg, parity).splitlines()


@pytest.mark.parametrize(
    ("network", "settings", "expected"),
    [
        (
            LeNetConfig(),
            {},
            f"{ONNX_RUNTIME}, onnx's reference evaluator; for others, layout=standard",
        ),
        (LeNetConfig(), {"layout": "standard"}, f"{ONNX_RUNTIME}, OpenVINO, tract"),
        (LeNetConfig(), {"quantize": "int8"}, f"{ONNX_RUNTIME}, OpenVINO, tract"),
        (SeparableConfig(), {"layout": "standard"}, f"{ONNX_RUNTIME}, {WITH_GELU}, tract"),
        (LeNetConfig(act="gelu"), {"quantize": "int8"}, f"{ONNX_RUNTIME}, {WITH_GELU}, tract"),
        (LLTMConfig(), {"layout": "standard"}, f"{ONNX_RUNTIME}, OpenVINO, tract"),
        (LLTMConfig(), {"layout": "standard", "precision": "fp16"}, f"{ONNX_RUNTIME}, OpenVINO"),
    ],
)
def test_runtimes_depend_on_network_and_layout(network, settings, expected):
    assert model_card.runtimes(network, ExportConfig(**settings)) == expected


def test_latency_of_one_image_on_one_thread(card):
    assert "| latency | 250 µs for one image on one thread |" in card


def test_throughput_on_all_threads(card):
    assert "| throughput | 2,048 images/s in batches of 1024 on all threads |" in card


def test_accuracy_and_parity(card):
    assert "| accuracy | 99.00% of 10,000 test images (99.01% in torch, float32) |" in card
    assert (
        "| parity | 3 predictions differ from torch's; logits by 1e-06 at most "
        "(the largest is 12.5) |"
    ) in card


def test_custom_operators_are_listed(card):
    assert "Custom operators defined in this file:" in card
