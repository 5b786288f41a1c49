import copy
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from app.config import ModelConfig
from app.model import build_model
from app.optimizer import AdamW


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
from app.optimizer import AdamW
weight = torch.ones(2, requires_grad=True)
weight.sum().backward()
AdamW([weight], weight_decay=0.0).step(lr=0.1)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
