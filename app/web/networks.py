"""Find the trained networks under `outputs`; load them through a cache."""

import functools
from contextlib import suppress
from pathlib import Path

from app.config.errors import UserError
from app.inference.predictor import TorchPredictor, load_torch
from app.runs.checkpoint import BEST
from app.runs.folder import (
    find_checkpoint,
    find_files,
    network_file,
    newest_first,
    read_settings,
    read_summary,
)


def find_networks(outputs: str, first: str | None = None) -> dict[str, Path]:
    """Return the checkpoints `first` and best.pt of the runs under `outputs` by id, newest first.

    Raise a UserError if there is none.
    """
    files = newest_first(find_files(Path(outputs), BEST))
    if first is not None:
        path = network_file(first, BEST)
        files = [path, *(file for file in files if file.resolve() != path.resolve())]
    if not files:
        find_checkpoint(outputs)  # raises the UserError
    return {path.as_posix(): path for path in files}


def title_of(path: Path) -> str:
    """Return the settings, the test accuracy and the place of a network in one line."""
    parts = ["/".join((path.parent if path.name == BEST else path).parts[-2:])]
    with suppress(UserError):  # no run folder
        if path.name == BEST and (accuracy := read_summary(path.parent).get("test_accuracy")):
            parts.insert(0, f"{accuracy:.2%}")
        network = read_settings(path.parent).get("model", {})
        parts.insert(0, " ".join(map(str, network.values())))
    return " · ".join(parts)


def load_network(path: Path) -> TorchPredictor:
    """Return the network in a checkpoint, cached until it changes, or raise a UserError."""
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


@functools.lru_cache(maxsize=16)
def _load(path: Path, _modified: int) -> TorchPredictor:
    return load_torch(path)
