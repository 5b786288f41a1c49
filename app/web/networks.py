"""Find the trained networks under `outputs`; load them through a cache."""

import functools
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from app.config.contents import Metadata
from app.config.errors import UserError
from app.config.schema import ModelConfig, from_mapping
from app.inference.predictor import Predictor, load_torch
from app.runs.folder import (
    find_checkpoint,
    find_files,
    is_outdated,
    network_file,
    newest_first,
    read_settings,
    read_summary,
    start_time,
)

CHECKPOINT = "best.pt"


@dataclass(frozen=True)
class Entry:
    """A file that holds a network."""

    id: str  # identifies the network in requests
    path: Path  # the checkpoint or the exported file
    title: str  # kind of network, displayed
    runtime: str  # torch or ONNX, displayed
    accuracy: float | None  # on the test images, in [0, 1]; None: unknown
    started: str  # local time of the start of the run; "": outside of a run folder
    dataset: str  # training data; "": unknown
    parameters: int | None  # None: unknown


def find_networks(outputs: str, first: str | None = None) -> dict[str, Entry]:
    """Return the networks in `first` and under `outputs` by id, newest run first.

    Raise a UserError if there is none.
    """
    root = Path(outputs)
    files = [*find_files(root, CHECKPOINT), *find_files(root, "*.onnx")]
    # within a folder: the checkpoint, then model.onnx, then the others
    files.sort(key=lambda path: (path.suffix != ".pt", path.name.count("-"), path))
    files = newest_first(files)
    if first is not None:
        path = network_file(first, CHECKPOINT)
        files = [path, *(file for file in files if file.resolve() != path.resolve())]
    if not files:
        find_checkpoint(outputs)  # raises the UserError
    inside = [path.relative_to(root) if path.is_relative_to(root) else path for path in files]
    ids = [path.as_posix() for path in inside]
    entries = {}
    for id, path in zip(ids, files, strict=True):
        with suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            entries[id] = _entry(id, path)
    return entries


def _entry(id: str, path: Path) -> Entry:
    path.stat()  # raises if the file is gone
    model: ModelConfig | None = None
    accuracy, dataset, parameters, outdated = None, "", None, is_outdated(path)
    with suppress(UserError, KeyError):  # no run folder, or an unfinished run
        settings, summary = read_settings(path.parent), read_summary(path.parent)
        dataset = summary.get("dataset") or settings["data"]["name"]
        model = from_mapping(ModelConfig, settings["model"])
        parameters = summary.get("parameters")
        accuracy = summary.get("test_accuracy") if path.name == CHECKPOINT else None
    if path.suffix == ".onnx":
        accuracy = _exported_accuracy(path, path.stat().st_mtime_ns)
    choices = (getattr(model, key, None) for key in ("act", "conv", "head"))
    title = " ".join(choice for choice in choices if choice and choice != "fc")
    folder, time = path.parent, start_time(path.parent)
    exported = f"ONNX {path.stem.removeprefix('model').replace('-', ' ').strip()}".strip()
    runtime = "torch" if path.suffix == ".pt" else exported
    return Entry(
        id=id,
        path=path,
        title=title or getattr(model, "name", folder.name),
        runtime=runtime + (", older than the checkpoint" if outdated else ""),
        accuracy=accuracy,
        started=f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}" if time else "",
        dataset=dataset,
        parameters=parameters,
    )


@functools.lru_cache(maxsize=1024)
def _exported_accuracy(path: Path, _modified: int) -> float | None:
    """Return the test accuracy in the metadata of an exported file; None if it has none."""
    from app.inference.onnx_file import read_metadata  # late: importing onnx is slow

    try:
        return from_mapping(Metadata, read_metadata(path)).test_accuracy
    except Exception:  # onnx raises many types for damaged files
        return None


def load_network(path: Path) -> Predictor:
    """Return the network in a file, cached until the file changes, or raise a UserError."""
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


@functools.lru_cache(maxsize=16)
def _load(path: Path, _modified: int) -> Predictor:
    if path.suffix == ".onnx":
        from app.inference.onnx_runtime import load_onnx  # late: importing it is slow

        return load_onnx(path, threads=1)
    return load_torch(path)
