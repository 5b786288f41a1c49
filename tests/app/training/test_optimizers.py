import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from app.config.schema import LeNetConfig, OptimConfig
from app.models import build_model
from app.training.optimizers import AdamW, Muon, Stack, one_cycle, orthogonalize


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_adamw_matches_torch(device):
    ours = build_model(LeNetConfig("gelu"), 10).to(device)
    theirs = copy.deepcopy(ours)
    optimizer = AdamW(ours.parameters(), weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), weight_decay=0.1, fused=True)
    for step in range(5):
        images = torch.randn(16, 1, 28, 28, device=device)
        labels = torch.randint(0, 10, (16,), device=device)
        F.cross_entropy(ours(images), labels).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.clone()
        optimizer.step(lr=0.01 * (step + 1))
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        reference.step()
        reference.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
            assert mine.grad is None


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_muon_matches_torch(device, together):
    """Compare to bfloat16 precision, in which torch.optim.Muon orthogonalises."""
    torch.manual_seed(0)
    shapes = ((12, 30), (30, 12), (7, 21))
    ours = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    theirs = [weight.detach().clone().requires_grad_() for weight in ours]
    optimizer = Muon(ours, weight_decay=0.1, momentum=0.8)
    optimizer.stacks = [Stack(group) for group in ([ours] if together else zip(ours, strict=True))]
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.8)
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        before = [weight.detach().clone() for weight in ours]
        optimizer.step(lr=0.1)
        reference.step()
        for mine, other, old in zip(ours, theirs, before, strict=True):
            assert (mine - other).norm() < 0.05 * (mine - old).norm()
            assert mine.grad is None
            other.data.copy_(mine.data)


def test_muon_updates_biases_by_adamw():
    model = build_model(LeNetConfig("ncrelu", "depthwise"), 10)
    twin = copy.deepcopy(model)
    muon, adamw = Muon(model.parameters(), 0.1), AdamW(twin.parameters(), 0.1)
    for network, optimizer in ((model, muon), (twin, adamw)):
        torch.manual_seed(0)
        network(torch.randn(8, 1, 28, 28)).square().sum().backward()
        optimizer.step(lr=0.1)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other) == (mine.ndim == 1)


@pytest.mark.parametrize("shape", [(5, 20), (20, 5), (1, 9)])
def test_orthogonalize(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalize(matrix)
    singular = u.mT @ result @ v.mT  # diagonal, with singular values near 1
    torch.testing.assert_close(singular, singular.diagonal().diag())
    assert singular.diagonal().min() > 0.6
    assert singular.diagonal().max() < 1.3
    assert orthogonalize(torch.zeros(shape)).count_nonzero() == 0


def test_parameter_without_gradient_raises():
    weight = torch.zeros(3, requires_grad=True)
    with pytest.raises((TypeError, RuntimeError)):
        AdamW([weight], weight_decay=0.0).step(lr=0.1)


def test_training_does_not_import_dynamo():
    code = """
import sys, torch, app.training.trainer
from app.training.optimizers import AdamW, Muon, Stack, one_cycle, orthogonalize
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


def test_one_cycle_matches_torch():
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
