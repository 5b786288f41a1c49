"""Run folders: outputs/<date>/<time>-<random>, one a run, locked by the process that writes."""

import dataclasses
import json
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from app.config.cli import swept_dir, typed_overrides
from app.config.errors import UserError
from app.config.schema import TrainConfig
from app.runs.files import write_atomically

CONFIG = Path(".hydra", "config.yaml")  # a folder without it is no run
OVERRIDES = Path(".hydra", "overrides.yaml")
LAUNCH = Path(".hydra", "launch")  # identifies the torchrun launch that made the folder
LOCK = Path(".hydra", "lock")
SUMMARY = "summary.json"
COMMANDS = {
    "best.pt": "train one with `python -m app.train`",
    "model.onnx": "export one with `python -m app.export_onnx`",
}
RESULTS = ("test_accuracy", "val_accuracy", "parameters", "training_seconds", "images_per_second")
FREE = ("resume", "data.root", "device", "outputs")  # do not make another kind of run


def create_run_folder(cfg: TrainConfig, launch: str = "") -> Path:
    """Make the folder of a run with its configuration in `.hydra/`; in a sweep it is Hydra's.

    Called after all checks, so that wrong usage leaves nothing behind. The configuration comes
    last: a folder without one is no run. `launch` identifies the launch of torchrun.

    Raises:
        UserError: The folder cannot be made.
        WriteError: A file in it cannot be written.
    """
    folder = swept_dir() or Path(cfg.outputs) / run_name()
    try:
        (folder / CONFIG.parent).mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise UserError(f"outputs={cfg.outputs}: cannot be written: {error.strerror}") from error
    typed = OmegaConf.to_yaml(list(typed_overrides().values()))
    write_atomically(folder / OVERRIDES, typed.encode())
    if launch:
        write_atomically(folder / LAUNCH, launch.encode())
    write_atomically(folder / CONFIG, OmegaConf.to_yaml(dataclasses.asdict(cfg)).encode())
    return folder


def run_name() -> str:
    """Return a name for a new run: `<date>/<time>-<eight random hexadecimal digits>`."""
    return f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run; it ends with the process at the latest.

    Raises:
        UserError: Another process holds it, or the folder cannot be written.
    """
    try:
        with FileLock(folder / LOCK, blocking=False):
            yield
    except Timeout as error:
        raise UserError(f"resume={folder}: the run is going on in another process") from error


def find_runs(root: Path) -> list[Path]:
    """Return the run folders at any depth under `root`."""
    return [path.parents[1] for path in root.rglob(str(CONFIG))]


def started(folder: Path) -> int:
    """Return when the run in `folder` was started, in nanoseconds; 0 if it is no run."""
    try:
        return (folder / CONFIG).stat().st_mtime_ns
    except OSError:
        return 0


def newest(runs: Iterable[Path]) -> Path | None:
    """Return the run that was started last; None of none."""
    return max(runs, key=started, default=None)


def find_run(resume: str, outputs: str) -> Path:
    """Return the run folder for `resume`: a folder, one of its checkpoints, or `latest`.

    Raises:
        UserError: There is no such run.
    """
    if resume == "latest":
        latest = newest(find_runs(Path(outputs)))
        if latest is None:
            raise UserError(f"resume=latest: no run under {outputs}/")
        return latest
    folder = Path(resume).expanduser()
    folder = folder.parent if folder.is_file() else folder
    if not (folder / CONFIG).is_file():
        raise UserError(f"resume={resume}: not a run folder (no {folder / CONFIG})")
    return folder


def find_checkpoint(outputs: str | Path = "outputs", name: str = "best.pt") -> Path:
    """Return the file `name` of the newest run under `outputs` that has one.

    The newest run is the one that was started last; files outside of run folders come after all
    runs, the newest file first. A line on stderr names the run if it is not finished, or if a newer
    one has no such file.

    Raises:
        UserError: None has one, or `outputs` cannot be read.
    """
    root = Path(outputs)
    try:
        files = {path.parent: path.stat().st_mtime_ns for path in root.rglob(name)}
        runs = find_runs(root)
    except OSError as error:
        raise UserError(f"outputs={outputs}: {error.strerror}") from error
    if not files:
        raise UserError(f"no run under {outputs}/ has a {name}: {COMMANDS[name]}")
    folder = max(files, key=lambda path: (started(path), files[path]))
    status = status_of(read_summary(folder)) if folder in runs else "finished"
    told = f"using {folder / name} ({status})"
    without = newest(run for run in runs if started(run) > started(folder))
    if without:
        told += f": {without} ({status_of(read_summary(without))}) has no {name}"
    if without or status != "finished":
        print(told, file=sys.stderr)
    return folder / name


def status_of(summary: dict[str, Any]) -> str:
    """Return finished, interrupted, failed; or unfinished: running or killed."""
    return str(summary.get("status", "unfinished"))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in `folder` as nested plain values.

    Raises:
        UserError: It cannot be read.
    """
    return _read(folder / CONFIG, lambda text: OmegaConf.to_container(OmegaConf.create(text)))


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the `summary.json` of the run in `folder`; empty where there is none yet.

    Raises:
        UserError: It cannot be read, or lacks the results of a finished run.
    """
    path = folder / SUMMARY
    summary = _read(path, json.loads) if path.is_file() else {}
    for key in RESULTS if summary.get("status") == "finished" else ():
        if not isinstance(summary.get(key), int | float):
            raise UserError(f"{path}: cannot be read: {key!r} must be a number")
    return summary


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        values = parse(path.read_text())
    except Exception as error:  # every kind of damage has a type of its own
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: cannot be read: must be a mapping")
    return values


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries or dataclasses by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in (values if isinstance(values, dict) else dataclasses.asdict(values)).items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
