"""Configurations of networks that several tests use."""

from types import SimpleNamespace

import torch

from app.config.schema import SeparableConfig

TINY = SeparableConfig([[16], [24, 24], [40, 48]])  # model=tiny


def edit_checkpoint(path, change):
    """Apply `change` to the fields of a checkpoint, as attributes of plain values."""
    fields = SimpleNamespace(**torch.load(path, weights_only=True))
    change(fields)
    del fields.digest
    torch.save(vars(fields), path)
