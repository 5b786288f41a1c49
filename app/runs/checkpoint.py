"""Checkpoints best.pt and last.pt: contents, atomic write, load without pickled code."""

import dataclasses
import errno
import functools
import hashlib
import io
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from app.config.contents import TrainingData
from app.config.errors import UserError, is_out_of_memory, one_line
from app.config.schema import ModelConfig, from_mapping, printable
from app.models import build_model
from app.runs.files import write_atomically
from app.runs.folder import REMEDIES, network_file, own_settings

BEST, LAST = "best.pt", "last.pt"
FORMAT = 1  # incremented on changes that older versions cannot read
SPLIT_KEYS = ("name", "val_size", "split_seed")  # of `Checkpoint.data`: determine the split
MAX_BYTES = 2**31  # of a file
DTYPES = (torch.float32, torch.int64)  # of weights and of counters
MAX_VALUES = 100_000


@dataclass
class Checkpoint:
    """The contents of a checkpoint: tensors and plain Python values only."""

    model: dict[str, Any]  # state dict on the CPU; with EMA, of the averaged weights
    model_config: ModelConfig
    data: TrainingData
    metrics: dict[str, int | float | None] = field(default_factory=dict)  # epoch, step, ...
    config: dict[str, Any] = field(default_factory=dict)  # fields of `TrainConfig`, nested
    training: dict[str, Any] = field(default_factory=dict)  # state to resume from; empty in best.pt

    @functools.cached_property
    def network(self) -> nn.Module:
        """The network, on the CPU, in evaluation mode; built once."""
        model = build_model(self.model_config, len(self.data.classes))
        model.load_state_dict(self.model)
        return model.eval()


FIELDS = [item.name for item in dataclasses.fields(Checkpoint)]


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint with its digest atomically, as `write_atomically` does."""
    fields = {name: getattr(checkpoint, name) for name in FIELDS}
    for name in ("model_config", "data"):
        fields[name] = dataclasses.asdict(fields[name])
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "digest": digest(fields)} | fields, buffer)
    write_atomically(path, buffer.getbuffer())


def digest(content: Any) -> str:
    """Return the BLAKE2b digest of nested containers, plain values and tensors."""
    result = hashlib.blake2b(digest_size=16)
    for value in iterate_values(content):
        if isinstance(value, Tensor):
            result.update(f"{value.dtype}{list(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            result.update(flat.view(torch.uint8).numpy().data)
        else:
            result.update(f"{value!r},".encode())
    return result.hexdigest()


def iterate_values(content: Any) -> Iterator[Any]:
    """Yield the values and the lengths of nested containers in a fixed order.

    Raise a ValueError for more than `MAX_VALUES`: shared sub-lists can expand exponentially.
    """
    stack, count = [content], 0
    while stack:
        count += 1
        value = stack.pop()
        if isinstance(value, dict):
            value = [part for item in value.items() for part in item]
        if isinstance(value, list | tuple):
            stack += reversed(value)
            value = len(value)
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        yield value


def load_checkpoint(path: str | Path, key: str = "checkpoint") -> Checkpoint:
    """Load a checkpoint (`best.pt` if `path` is a run folder) to the CPU without pickled code.

    Raise a UserError that names the setting `key` if the file is missing or invalid.
    """
    path = network_file(path, "best.pt", key)
    name = f"{key}={path}"
    remedy = f": take another, or {REMEDIES['best.pt']}" if key == "checkpoint" else ""
    try:
        check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
        check_tensors(content, path.stat().st_size)
        check_format(content, name)
        fields = {key: content[key] for key in FIELDS if key in content}
        if "digest" in content and content["digest"] != digest(fields):  # older files have none
            raise ValueError("the digest differs")
    except Exception as error:  # torch.load raises many types
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a wrong offset
            raise UserError(f"{name}: cannot be read: {error.strerror or error}") from error
        raise UserError(f"{name}: damaged, or not a checkpoint{remedy}") from error
    try:
        return check_fields(fields)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"its contents do not fit: {printable(one_line(error))}"
        raise UserError(f"{name}: {reason}") from error


def check_archive(path: Path) -> None:
    """Raise a BadZipFile for an archive larger than its file or `MAX_BYTES`.

    The digest finds other damage.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise zipfile.BadZipFile(f"more than {MAX_BYTES:,} bytes")
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:  # compressed or overlapping
            raise zipfile.BadZipFile("larger than its file")


def check_tensors(content: Any, size: int) -> None:
    """Raise a ValueError if the tensors are not plain or have more than `size` bytes."""
    for value in iterate_values(content):
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
                raise ValueError("a tensor that is not dense")
            if value.is_neg() or value.is_conj():  # lazy: its bytes are not its values
                raise ValueError("a tensor with the negative or conjugate bit")
            size -= value.numel() * value.element_size()  # an expanded one has more than its file
            if size < 0:
                raise ValueError("tensors larger than the file")


def check_format(content: Any, name: str) -> None:
    """Raise a UserError that begins with `name` for another program's file or a newer format."""
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise UserError(f"{name}: not a checkpoint of this program")
    if content["format"] > FORMAT:
        raise UserError(
            f"{name}: has format {content['format']}, made by a newer version; "
            f"this one reads up to format {FORMAT}"
        )


def check_fields(fields: dict[str, Any]) -> Checkpoint:
    """Build the checkpoint and its network from `fields`; raise if types or shapes do not match."""
    if isinstance(fields.get("model_config"), dict):
        fields["model_config"] = own_settings(fields["model_config"])
    checkpoint: Checkpoint = from_mapping(Checkpoint, fields)
    for name, value in checkpoint.model.items():
        if not (isinstance(value, Tensor) and value.dtype in DTYPES and value.isfinite().all()):
            raise UserError(f"model.{name}: must be finite numbers of type float32 or int64")
    _ = checkpoint.network  # raises if the weights do not fit
    return checkpoint
