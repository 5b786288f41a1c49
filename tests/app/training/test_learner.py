"""A step of training. What a run makes of many is in test_training.py."""

import torch
from torch import nn

from app.config.schema import ModelConfig, OptimConfig, TrainConfig
from app.models import build_model
from app.training.distributed import World
from app.training.learner import Learner


def test_the_average_takes_over_what_is_not_trained():
    """Batch normalisation counts on its statistics, which are no parameters."""
    cfg = TrainConfig(model=ModelConfig(conv="involution"), optim=OptimConfig(ema=0.9))
    device = torch.device("cpu")
    learner = Learner(build_model(cfg.model, 10), cfg, device, World(0, 1))
    before = [buffer.clone() for buffer in learner.trained.buffers()]
    for _ in range(2):
        learner.step(torch.randn(8, 1, 28, 28), torch.arange(8), lr=0.01, share=0.1)
    assert any(isinstance(module, nn.BatchNorm2d) for module in learner.trained.modules())
    after = list(learner.trained.buffers())
    for old, new, trained in zip(before, after, learner.model.buffers(), strict=True):
        assert torch.equal(new, trained)
        assert not torch.equal(new, old)
