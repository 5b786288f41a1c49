"""Loss, EMA and weights of a training step on the CPU, against PyTorch."""

import argparse
import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from app.config.schema import LeNetConfig, OptimConfig, TrainConfig, TrainerConfig
from app.data.datasets import Dataset, Split
from app.data.sampler import plan_epoch
from app.data.transforms import normalize
from app.models import build_model, cpu_format
from app.training.distributed import World
from app.training.optimizers import ema_weight
from app.training.step import LOSS, TrainStep

ROOT = Path(__file__).parents[3]


def train_step(model=None, compile="auto", **optim):
    torch.manual_seed(0)
    model = model or LeNetConfig("gelu")
    trainer = TrainerConfig(batch_size=16, compile=compile)
    cfg = TrainConfig(model=model, optim=OptimConfig("adamw", **optim), trainer=trainer)
    images = torch.randint(0, 256, (64, 1, 28, 28), dtype=torch.uint8)
    split = Split(images, torch.arange(64) % 10)
    data = Dataset("mnist", tuple("0123456789"), 0.1, 0.3, split, split, split)
    return TrainStep(build_model(model, 10), data, cfg, torch.device("cpu"), World())


def batch_of(step, index):
    plan = plan_epoch(step.cfg.seed, 0, 64, 16, None)
    rows, data = plan.batches[index], step.data
    return normalize(data.train.images[rows], data.mean, data.std), data.train.labels[rows]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_cross_entropy(smoothing):
    step = train_step(label_smoothing=smoothing)
    images, labels = batch_of(step, 0)
    expected = F.cross_entropy(step.model(images), labels, label_smoothing=smoothing)
    step.begin(0, 0)
    step.take()
    assert step.statistics[0, LOSS] == expected


def test_compiled_kernels_are_not_chosen_by_timing(monkeypatch):
    """Timings differ from run to run, and other sizes of a reduction give other bits."""
    options = []

    def compile_fx(graph, inputs, config_patches=None, **_):
        options.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    step = train_step(compile=True)
    step.begin(0, 0)
    step.take()
    assert options and all(option["deterministic"] for option in options)


def test_ema_matches_its_definition():
    step = train_step(ema=0.7)
    expected = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.begin(0, 0)
    for index in range(4):
        step.take()
        weight = max(1 - 0.7, 1 / (index + 1))
        for average, parameter in zip(expected, step.model.parameters(), strict=True):
            average.add_(parameter.detach() - average, alpha=weight)
    for average, parameter in zip(expected, step.average.parameters(), strict=True):
        torch.testing.assert_close(parameter, average, rtol=1e-5, atol=1e-7)


def test_ema_weight_starts_as_a_mean():
    assert [ema_weight(step, 0.9) for step in (0, 1, 2)] == [1, 1 / 2, 1 / 3]
    assert ema_weight(1000, 0.9) == pytest.approx(0.1)
    assert ema_weight(1000, 0.0) == 1


def test_ema_copies_batch_norm_statistics():
    step = train_step(LeNetConfig(conv="involution"), ema=0.9)
    before = [buffer.clone() for buffer in step.trained.buffers()]
    step.begin(0, 0)
    for _ in range(2):
        step.take()
    assert any(isinstance(module, nn.BatchNorm2d) for module in step.trained.modules())
    after = list(step.trained.buffers())
    for old, new, trained in zip(before, after, step.model.buffers(), strict=True):
        assert torch.equal(new, trained)
        assert not torch.equal(new, old)


def test_step_matches_torch_adamw():
    step = train_step(weight_decay=0.1)
    reference = copy.deepcopy(step.model)
    optimizer = torch.optim.AdamW(reference.parameters(), weight_decay=0.1, fused=True)
    step.begin(0, 0)
    for index in range(3):
        images, labels = batch_of(step, index)
        F.cross_entropy(reference(images), labels, label_smoothing=0.1).backward()
        optimizer.param_groups[0]["lr"] = torch.tensor(step.schedule.rate(index)).item()
        optimizer.step()
        optimizer.zero_grad()
        step.take()
    for mine, other in zip(step.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_benchmark_uses_the_memory_format_of_training(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts")])
    spec = importlib.util.spec_from_file_location("bench_train", ROOT / "scripts/bench_train.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "load_dataset", lambda cfg: train_step().data)
    args = argparse.Namespace(device="cpu", act="ncrelu", epochs=1, batch_size=16)
    model = bench.make_step(args, OptimConfig()).model
    expected = build_model(LeNetConfig("ncrelu"), 10)
    expected.to(memory_format=cpu_format(LeNetConfig("ncrelu")))
    strides = [parameter.stride() for parameter in expected.parameters()]
    assert [parameter.stride() for parameter in model.parameters()] == strides
