"""Checkpoints best.pt and last.pt: contents, atomic write, load without pickled code."""

import dataclasses
import functools
import io
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.config.errors import UserError, one_line
from app.config.schema import DataConfig, ModelConfig, from_mapping
from app.models import build_model
from app.runs.files import write_atomically
from app.runs.folder import REMEDIES, network_file, own_settings

FORMAT = 1  # incremented on changes that older versions cannot read
SPLIT_KEYS = ("name", "val_size", "split_seed")  # of `Checkpoint.data`: determine the split


@dataclass
class Checkpoint:
    """The contents of a checkpoint: tensors and plain Python values only."""

    model: dict[str, Tensor]  # state dict on the CPU; with EMA, of the averaged weights
    model_config: dict[str, Any]  # fields of `ModelConfig`
    # name, classes (list of str), mean and std of the training pixels in [0, 1],
    # fallback_from (str or None), val_size, split_seed
    data: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)  # epoch, step, val_accuracy, ...
    config: dict[str, Any] = field(default_factory=dict)  # fields of `TrainConfig`, nested
    training: dict[str, Any] = field(default_factory=dict)  # state to resume from; empty in best.pt

    @functools.cached_property
    def network(self) -> nn.Module:
        """The network, on the CPU, in evaluation mode; built once."""
        cfg: ModelConfig = from_mapping(ModelConfig, self.model_config, "model.")
        model = build_model(cfg, len(self.data["classes"]))
        model.load_state_dict(self.model)
        return model.eval()


FIELDS = [item.name for item in dataclasses.fields(Checkpoint)]


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically, as `write_atomically` does."""
    fields = {name: getattr(checkpoint, name) for name in FIELDS}
    buffer = io.BytesIO()
    torch.save({"format": FORMAT} | fields, buffer)
    write_atomically(path, buffer.getbuffer())


def load_checkpoint(path: str | Path, key: str = "checkpoint") -> Checkpoint:
    """Load a checkpoint (`best.pt` if `path` is a run folder) to the CPU without pickled code.

    Raise a UserError that names the setting `key` if the file is missing, damaged, inconsistent, of
    a newer format, or not a checkpoint of this program.
    """
    path = network_file(path, "best.pt", key)
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load does not verify checksums
                raise zipfile.BadZipFile(damaged)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types
        remedy = f": take another, or {REMEDIES['best.pt']}" if key == "checkpoint" else ""
        raise UserError(f"{key}={path}: damaged, or not a checkpoint{remedy}") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise UserError(f"{key}={path}: not a checkpoint of this program")
    if content["format"] > FORMAT:
        raise UserError(
            f"{key}={path}: has format {content['format']}, made by a newer version; "
            f"this one reads up to format {FORMAT}"
        )
    try:
        checkpoint = Checkpoint(**{name: content[name] for name in FIELDS if name in content})
        checkpoint.model_config = own_settings(checkpoint.model_config)
        values = {name: checkpoint.data[name] for name in SPLIT_KEYS if name in checkpoint.data}
        from_mapping(DataConfig, values, "data.")
        assert checkpoint.network  # builds the network
    except (UserError, RuntimeError, TypeError, KeyError, AttributeError, ValueError) as error:
        reason = f"its contents do not fit: {one_line(error)}"
        raise UserError(f"{key}={path}: {reason}") from error
    return checkpoint
