import dataclasses
import functools
import io
import math
import platform
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.config.errors import UserError
from app.config.schema import ModelConfig, from_mapping
from app.models import build_model
from app.runs.files import write_atomically

FORMAT = 1  # raised when an older program could not read the file


@dataclass
class Checkpoint:
    """A trained model and what is needed to use it, as plain tensors and plain data.

    Attributes:
        model: The model's state dict, on the CPU; of the averaged weights where there are.
        model_config: Fields of `ModelConfig`.
        data: What the model was trained on: `name`, `classes` (list of str), `mean` and `std` of
            the pixels in [0, 1], `fallback_from` (str or None), `val_size`, `split_seed`.
        metrics: Numbers so far: `epoch`, `step`, `val_accuracy`, ...
        config: The whole configuration of the run, as nested plain values.
        training: What a run needs to go on from here, see `app.training.state`; empty in a
            checkpoint for use only.
        versions: What it was made with: `python`, `torch`, ...
    """

    model: dict[str, Tensor]
    model_config: dict[str, Any]
    data: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }
    )

    @functools.cached_property
    def network(self) -> nn.Module:
        """The network, on the CPU, in evaluation mode; built once."""
        cfg = from_mapping(ModelConfig, self.model_config, "model.")
        model = build_model(cfg, len(self.data["classes"]))
        model.load_state_dict(self.model)
        return model.eval()


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` so that `path` is at every moment the old file or the whole new one.

    Raises:
        RunError: The file cannot be written (no space, no permission); the old one is untouched.
    """
    content = {"format": FORMAT} | {
        item.name: getattr(checkpoint, item.name) for item in dataclasses.fields(checkpoint)
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getbuffer())


def load_checkpoint(path: str | Path, key: str = "checkpoint") -> Checkpoint:
    """Read a checkpoint, its tensors on the CPU; nothing in the file is executed.

    Args:
        path: The file, or a run folder, which stands for its `best.pt`.
        key: The setting that names it, for messages.

    Raises:
        UserError: The file is missing, damaged, no checkpoint of this program, a newer one's, or
            one whose parts do not fit together.
    """
    path = Path(path)
    try:
        if path.is_dir():  # a run folder
            path = path / "best.pt"
        if not path.is_file():
            raise UserError(f"{key}={path}: {'not a' if path.exists() else 'no such'} file")
    except OSError as error:  # too long a name, say
        raise UserError(f"{key}={path}: {error.strerror}") from error
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch compares no checksums
                raise zipfile.BadZipFile(damaged)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a different type for every way to be damaged
        exported = path.suffix == ".onnx"
        what = "an exported file, not a checkpoint" if exported else "damaged, or not a checkpoint"
        raise UserError(f"{key}={path}: {what}") from error
    names = [item.name for item in dataclasses.fields(Checkpoint)]
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise UserError(f"{key}={path}: not a checkpoint of this program")
    if content["format"] > FORMAT:
        raise UserError(
            f"{key}={path}: has format {content['format']}, made by a newer version; "
            f"this one reads up to format {FORMAT}"
        )
    content.setdefault("training", {})  # files of before runs could be resumed
    missing = [name for name in names if name not in content]
    if missing:
        raise UserError(f"{key}={path}: not a checkpoint of this program (no {missing[0]!r})")
    checkpoint = Checkpoint(**{name: content[name] for name in names})
    try:
        _check(checkpoint)
    except (UserError, RuntimeError, TypeError, KeyError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{key}={path}: its contents do not fit: {reason}") from error
    return checkpoint


def _check(checkpoint: Checkpoint) -> None:
    """Raise an exception of whatever type if the parts do not make a usable model."""
    data = checkpoint.data
    if not all(isinstance(name, str) for name in (data["name"], *data["classes"])):
        raise ValueError("names of the data set and its classes must be text")
    if not (math.isfinite(data["mean"]) and math.isfinite(data["std"]) and data["std"] > 0):
        raise ValueError(f"mean {data['mean']} and std {data['std']} of the pixels")
    for name, tensor in checkpoint.model.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite")
    assert checkpoint.network  # builds it


def load_model(checkpoint: Checkpoint) -> nn.Module:
    """Return the model of `checkpoint`, on the CPU, in evaluation mode; it is built once."""
    return checkpoint.network
