"""Training steps replayed as a CUDA graph."""

import dataclasses
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from app.config.schema import LeNetConfig
from app.runs.checkpoint import load_checkpoint
from app.runs.folder import find_runs
from app.training.distributed import World
from app.training.state import start
from app.training.trainer import train
from tests.app.training import test_resume
from tests.app.training.test_resume import cfg  # noqa: F401

pytestmark = pytest.mark.cuda


@contextmanager
def train_step(cfg):  # noqa: F811
    with ExitStack() as stack:
        yield start(cfg, World(), stack, {}, None).train_step


def weights_after_training(cfg):  # noqa: F811
    train(cfg)
    newest = max(find_runs(Path(cfg.outputs)), key=lambda folder: folder.stat().st_mtime_ns)
    return load_checkpoint(newest / "last.pt").model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    "model", [LeNetConfig("ncrelu", "depthwise"), LeNetConfig(conv="involution")]
)
def test_graph_matches_eager_bitwise(cfg, precision, model):  # noqa: F811
    cfg.device, cfg.model, cfg.trainer.precision = "cuda", model, precision
    replayed, again = weights_after_training(cfg), weights_after_training(cfg)
    cfg.trainer.compile = False
    taken = weights_after_training(cfg)
    for name, value in taken.items():
        assert torch.equal(value, replayed[name]), name
        assert torch.equal(value, again[name]), name


def test_resume_on_gpu_is_bitwise_equal(cfg, monkeypatch):  # noqa: F811
    cfg.device = "cuda"
    test_resume.test_resume_is_bitwise_equal(cfg, monkeypatch, [("take", 9)])


def test_compiled_network_matches_eager(cfg):  # noqa: F811
    statistics = []
    for compiled in ("auto", True):
        trainer = dataclasses.replace(cfg.trainer, compile=compiled)
        with train_step(dataclasses.replace(cfg, device="cuda", trainer=trainer)) as steps:
            steps.begin(0, 0)
            for _ in range(3):
                steps.take()
            statistics.append(steps.statistics[:3])
    torch.testing.assert_close(*statistics, rtol=1e-3, atol=1e-3)


def test_steps_do_not_synchronize(cfg):  # noqa: F811
    for compiled in ("auto", False):
        trainer = dataclasses.replace(cfg.trainer, compile=compiled)
        with train_step(dataclasses.replace(cfg, device="cuda", trainer=trainer)) as steps:
            steps.begin(0, 0)
            steps.take()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    steps.take()
            finally:
                torch.cuda.set_sync_debug_mode("default")
