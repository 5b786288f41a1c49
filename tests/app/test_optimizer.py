import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from app.config import ModelConfig, OptimConfig
from app.model import build_model
from app.optimizer import AdamW, one_cycle


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_it_takes_the_steps_of_torchs_class(device):
    ours = build_model(ModelConfig("gelu"), 10).to(device)
    theirs = copy.deepcopy(ours)
    optimizer = AdamW(ours.parameters(), weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), weight_decay=0.1, fused=True)
    for step in range(5):
        images = torch.randn(16, 1, 28, 28, device=device)
        labels = torch.randint(0, 10, (16,), device=device)
        for model in (ours, theirs):
            F.cross_entropy(model(images), labels).backward()
        optimizer.step(lr=0.01 * (step + 1))
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        reference.step()
        reference.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
            assert mine.grad is None


def test_a_parameter_without_a_gradient_is_an_error():
    weight = torch.zeros(3, requires_grad=True)
    with pytest.raises((TypeError, RuntimeError)):
        AdamW([weight], weight_decay=0.0).step(lr=0.1)


def test_training_starts_without_torchs_compiler():
    code = """
import sys, torch, app.training
from app.optimizer import AdamW, one_cycle
weight = torch.ones(2, requires_grad=True)
weight.sum().backward()
AdamW([weight], weight_decay=0.0).step(lr=0.1)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_one_cycle():
    cfg = OptimConfig(lr=0.8, warmup=0.25)
    rates = [one_cycle(step, 100, cfg) for step in range(100)]
    assert rates[0] == pytest.approx(0.8 / 25)
    assert rates[25] == max(rates) == 0.8
    assert rates[:26] == sorted(rates[:26])
    assert rates[25:] == sorted(rates[25:], reverse=True)
    assert 0 < rates[99] < 1e-3
    assert one_cycle(0, 1, cfg) > 0  # a run of one step


def test_one_cycle_is_the_usual_one():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=1001, pct_start=0.3, cycle_momentum=False
    )
    for step in range(1000):
        ours = one_cycle(step, 1000, OptimConfig(lr=0.1, warmup=0.3))
        assert ours == pytest.approx(
            optimizer.param_groups[0]["lr"], abs=5e-4
        )  # theirs is a step longer
        optimizer.step()
        theirs.step()
