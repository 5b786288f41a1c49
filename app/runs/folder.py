"""Run folders: outputs/<date>/<time>-<unique>, one for each run, never shared."""

import dataclasses
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from app.config.errors import UserError
from app.config.overrides import typed_overrides
from app.config.schema import TrainConfig, choices_of

CONFIG = Path(".hydra", "config.yaml")  # what makes a folder that of a run
SUMMARY = "summary.json"
RESULTS = ("test_accuracy", "val_accuracy", "parameters", "training_seconds", "images_per_second")
OVERRIDES = Path(".hydra", "overrides.yaml")
LAUNCH = Path(".hydra", "launch")  # which torchrun made it
FREE = ("resume", "data.root", "device", "outputs")  # may differ in one and the same run


def run_name() -> str:
    """A name for a new run: `<date>/<time>-<eight random hexadecimal digits>`."""
    return f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}"


def create_run_folder(cfg: TrainConfig, launch: str = "") -> Path:
    """Make the folder of this run and write its configuration to `.hydra/` in it.

    The folder is made by the run, not by Hydra, and only when everything that can be wrong with the
    command has been checked: wrong usage leaves nothing behind. In a sweep it is Hydra's own.
    It appears with its configuration or not at all, so that every run can be resumed.

    Args:
        cfg: The run's configuration.
        launch: What tells the launch of several processes from others; "" for none.

    Raises:
        UserError: The folder cannot be written.
    """
    folder, sweeping = Path(cfg.outputs) / run_name(), False
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        folder, sweeping = Path(HydraConfig.get().runtime.output_dir), True
    hidden = folder.with_name(f".{folder.name}.tmp")
    try:
        (hidden / CONFIG.parent).mkdir(parents=True)
        with locked(hidden):
            OmegaConf.save(OmegaConf.structured(cfg), hidden / CONFIG)
            OmegaConf.save(OmegaConf.create(typed_overrides()), hidden / OVERRIDES)
            if launch:
                (hidden / LAUNCH).write_text(launch)
            if sweeping and folder.is_dir():
                (hidden / CONFIG.parent).rename(folder / CONFIG.parent)
                hidden.rmdir()
            elif folder.exists():
                raise FileExistsError(0, "File exists")
            else:
                hidden.rename(folder)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise UserError(f"outputs={cfg.outputs}: cannot be written: {error.strerror}") from error
    return folder


def find_runs(root: Path) -> list[Path]:
    """The run folders at any depth under `root`, but not those that were killed half-made."""
    found = [path.parents[1] for path in root.rglob(str(CONFIG))]
    return [path for path in found if not path.name.startswith(".")]


def newest(runs: Iterable[Path]) -> Path | None:
    """The run that was started last; None of none."""
    return max(runs, key=lambda run: (run / CONFIG).stat().st_mtime_ns, default=None)


def find_run(resume: str, outputs: str) -> Path:
    """The run folder that `resume` names: itself, one of its checkpoints, or `latest`.

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


def find_checkpoint(outputs: str | Path = "outputs") -> Path:
    """The best checkpoint of the newest run anywhere under `outputs` that has one.

    Raises:
        UserError: There is none.
    """
    best = find_newest(outputs, "best.pt")
    if best is None:
        raise UserError(
            f"no run under {outputs}/ has a best.pt: train one with `python -m app.train`"
        )
    return best


def find_newest(outputs: str | Path, name: str) -> Path | None:
    """The newest file of that name in a run anywhere under `outputs`; None: there is none.

    A line on stderr names the run that was taken if it is not finished, or a newer one has no such
    file.

    Raises:
        UserError: `outputs` is no name that a folder could have.
    """
    root = Path(outputs)
    try:
        times = {path: path.stat().st_mtime_ns for path in root.rglob(name)}
        starts = {path: (path / CONFIG).stat().st_mtime_ns for path in find_runs(root)}
    except OSError as error:
        raise UserError(f"outputs={outputs}: {error.strerror}") from error
    if not times:
        return None
    file = max(times, key=lambda path: times[path])
    state = state_of(file.parent) if file.parent in starts else "finished"
    told = f"using {file} ({state})"
    newer = [run for run, start in starts.items() if start > times[file]]
    without = newest(run for run in newer if not (run / name).is_file())
    if without:
        told += f": {without} ({state_of(without)}) has no {name}"
    if without or state != "finished":
        print(told, file=sys.stderr)
    return file


def state_of(folder: Path) -> str:
    """What has become of a run: running, finished, interrupted, failed; unfinished if killed."""
    try:
        with locked(folder):
            pass
    except UserError:
        return "running"
    try:
        return str(read_summary(folder).get("status", "unfinished"))
    except UserError:
        return "unknown"


def read_settings(folder: Path) -> dict[str, Any]:
    """The configuration of the run in `folder`, as nested plain values.

    Raises:
        UserError: It cannot be read.
    """
    return _read(folder / CONFIG, lambda text: OmegaConf.to_container(OmegaConf.create(text)))


def read_summary(folder: Path) -> dict[str, Any]:
    """The `summary.json` of the run in `folder`; empty where there is none yet.

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
    except Exception as error:  # of a type for every way to be damaged
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: cannot be read: must be a mapping")
    return values


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to the same run; the lock ends with the process.

    Raises:
        UserError: One does.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"resume={folder}: the run is going on in another process") from error
        yield
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove what a run left that was killed as it wrote; the folder must be locked."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def idle(settings: dict[str, Any]) -> set[str]:
    """The dotted keys of a run's settings that only another network has a choice of."""
    own = choices_of(settings.get("model.name", "lenet"))
    return {f"model.{key}" for key in choices_of("lenet") if key not in own}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries or dataclasses by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in (values if isinstance(values, dict) else dataclasses.asdict(values)).items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
