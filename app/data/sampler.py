"""The batches of an epoch and the distortion of each image: a function of (seed, epoch)."""

from typing import NamedTuple

import torch
from torch import Tensor

from app.config.schema import AugmentConfig
from app.data.transforms import draw_affine


class Plan(NamedTuple):
    """The batches of an epoch, drawn on the CPU before its first step."""

    batches: Tensor  # indices into the training images, int64 [steps, batch]
    # affine maps of the images, float32 [steps, batch, 2, 3]; None without augmentation
    maps: Tensor | None


def plan_epoch(
    seed: int,
    epoch: int,
    count: int,
    batch_size: int,
    augment: AugmentConfig | None,
    share: tuple[int, int] = (0, 1),
) -> Plan:
    """Draw the plan of an epoch of `count` images, without those after the last full batch.

    `share` is (rank, number of processes): each takes its part of every batch.
    """
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    steps, (rank, ranks) = count // batch_size, share
    order = torch.randperm(count, generator=generator)[: steps * batch_size]
    batches = order.view(steps, batch_size)[:, rank::ranks]
    maps = None
    if augment is not None:
        drawn = draw_affine(steps * batch_size, 28, augment, generator)
        maps = drawn.view(steps, batch_size, 2, 3)[:, rank::ranks].contiguous()
    return Plan(batches.contiguous(), maps)
