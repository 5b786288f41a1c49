"""Which images make a batch, and how each is distorted: a function of (seed, epoch)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from app.augment import draw_affine
from app.config import AugmentConfig


@dataclass
class Plan:
    """What the steps of an epoch train on, on the device, drawn before the first of them.

    Attributes:
        batches: Indices into the training images, int64 [steps, batch].
        maps: Their distortions, float32 [steps, batch, 2, 3]; None where there is none.
    """

    batches: Tensor
    maps: Tensor | None


def plan_epoch(
    seed: int,
    epoch: int,
    count: int,
    batch_size: int,
    augment: AugmentConfig | None,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Plan:
    """Draw the plan of an epoch over `count` images; what is left after the last batch is skipped.

    Args:
        seed: Of the run.
        epoch: Counted from 0.
        count: Number of training images.
        batch_size: Images in a batch, of all processes together.
        augment: Largest distortions, for images of 28x28; None: none.
        device: Where the plan is to be.
        share: This process's number and how many there are; each takes its part of every batch.
    """
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    steps, (rank, ranks) = count // batch_size, share
    order = torch.randperm(count, generator=generator)[: steps * batch_size]
    batches = order.view(steps, batch_size)[:, rank::ranks]
    maps = None
    if augment is not None:
        drawn = draw_affine(steps * batch_size, 28, augment, generator)
        maps = drawn.view(steps, batch_size, 2, 3)[:, rank::ranks].contiguous().to(device)
    return Plan(batches.contiguous().to(device), maps)
