"""Which images make a batch, and how each is distorted: a function of (seed, epoch)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from app.config.schema import AugmentConfig
from app.data.transforms import draw_affine


@dataclass
class Plan:
    """What the steps of an epoch train on, drawn on the CPU before the first of them.

    Attributes:
        batches: Indices into the training images, int64 [steps, batch].
        maps: Their distortions, float32 [steps, batch, 2, 3]; None where there is none.
    """

    batches: Tensor
    maps: Tensor | None

    def to(self, device: torch.device) -> "Plan":
        """The plan on a device."""
        return Plan(self.batches.to(device), None if self.maps is None else self.maps.to(device))

    def copy_(self, other: "Plan") -> None:
        """Take over the plan of another epoch of the same run."""
        self.batches.copy_(other.batches)
        if self.maps is not None and other.maps is not None:
            self.maps.copy_(other.maps)


def plan_epoch(
    seed: int,
    epoch: int,
    count: int,
    batch_size: int,
    augment: AugmentConfig | None,
    share: tuple[int, int] = (0, 1),
) -> Plan:
    """Draw the plan of an epoch over `count` images; what is left after the last batch is skipped.

    Args:
        seed: Of the run.
        epoch: Counted from 0.
        count: Number of training images.
        batch_size: Images in a batch, of all processes together.
        augment: Largest distortions, for images of 28x28; None: none.
        share: This process's number and how many there are; each takes its part of every batch.
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
