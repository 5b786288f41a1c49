"""Run folders outputs/<date>/<time>-<unique>: create, lock, find, read."""

import dataclasses
import errno
import fcntl
import fnmatch
import functools
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml
from omegaconf import OmegaConf

from app.config.contents import RunSettings, Summary
from app.config.errors import UserError, one_line, reading, writing
from app.config.schema import TrainConfig, from_mapping, printable
from app.runs.files import write_atomically

CONFIG = Path(".hydra", "config.yaml")  # marks a run folder
LAUNCH = Path(".hydra", "launch")  # identity of the torchrun launch that created the folder
START = Path(".hydra", "start")  # start of the run, ISO 8601
LOCK = Path(".hydra", "lock")
# Errors of flock on file systems without locks, such as some NFS mounts.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
SUMMARY = "summary.json"
MAX_TEXT = 2**16  # bytes of a file of settings or results
REMEDIES = {  # hint for a missing file
    "best.pt": "train one with `python -m app.train`",
    "model.onnx": "export one with `python -m app.export_onnx`",
}
NON_HYPERPARAMETERS = (
    "resume",
    "data.root",
    "device",
    "outputs",
    "trainer.checkpoint_steps",
    "trainer.checkpoint_seconds",
)


def create_run_folder(cfg: TrainConfig, launch: str = "", folder: Path | None = None) -> Path:
    """Create a run folder, by default under `cfg.outputs`, and write the configuration.

    Write `.hydra/config.yaml` last, because it marks a run folder.
    """
    name = f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}"
    folder = folder or Path(cfg.outputs) / name
    with writing(f"outputs={cfg.outputs}", UserError):
        (folder / CONFIG.parent).mkdir(parents=True, exist_ok=False)
    write_atomically(folder / START, datetime.now().astimezone().isoformat().encode())
    if launch:
        write_atomically(folder / LAUNCH, launch.encode())
    write_atomically(folder / CONFIG, OmegaConf.to_yaml(dataclasses.asdict(cfg)).encode())
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in `folder`, or raise a UserError if another process holds it.

    A file system without locks has none.
    """
    with writing(folder), ExitStack() as stack:
        file = stack.enter_context((folder / LOCK).open("a"))
        try:
            _lock(file)
        except BlockingIOError as error:
            reason = f"resume={folder}: the run is going on in another process"
            raise UserError(reason) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        held = stack.pop_all()
    with held:
        yield


def _lock(file: IO[str]) -> None:
    """Lock a file. Try twice: `is_running` in another process holds the lock for an instant."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    time.sleep(0.05)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_running(folder: Path) -> bool:
    """Return whether another process holds the lock of the run in `folder`."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # also without a lock file, or on a file system without locks
        return isinstance(error, BlockingIOError)
    return False


def start_time(folder: Path) -> float:
    """Return the start of the run in `folder`, in seconds since 1970; 0 for any other folder."""
    with suppress(OSError, ValueError, OverflowError):
        return datetime.fromisoformat(_read_text(folder / START)).timestamp()
    with suppress(OSError):
        return (folder / CONFIG).stat().st_mtime  # older versions did not write START
    return 0.0


def find_runs(root: Path, key: str = "outputs") -> list[Path]:
    """Return the run folders under `root`, oldest start first, as `find_files` finds them."""
    files = find_files(root, CONFIG.name, key)
    marks = [file for file in files if file.parent.name == CONFIG.parent.name]
    return sorted((mark.parents[1] for mark in marks), key=start_time)


def all_runs(root: Path, key: str = "outputs") -> list[Path]:
    """Return the run folders under `root`, oldest first; raise a UserError if there is none."""
    runs = find_runs(root, key)
    if not runs:
        where = _describe(root) if root.exists() else f"{root}/ (no such folder)"
        raise UserError(f"no run under {where}: {REMEDIES['best.pt']}")
    return runs


def _describe(root: Path) -> str:
    """Return `root` for an error message: with a slash, or marked as a file."""
    return f"{root} (a file, not a folder)" if root.is_file() else f"{root}/"


def find_files(root: Path, name: str, key: str = "outputs") -> Iterator[Path]:
    """Yield the files `name` (may be a pattern) at any depth under `root`, the value of `key`.

    Skip unreadable folders with a warning; raise a UserError if `root` is one.
    """

    def skip(error: OSError) -> None:
        if isinstance(error, FileNotFoundError | NotADirectoryError):  # perhaps deleted meanwhile
            return
        reason = f"{error.filename}: cannot be read: {error.strerror}"
        if error.filename == str(root):
            raise UserError(f"{key}={reason}")
        warn_once(f"skipped {reason}")

    for folder, _, files in os.walk(root, onerror=skip):
        yield from (Path(folder, file) for file in fnmatch.filter(files, name))


def newest_first(files: Iterable[Path]) -> list[Path]:
    """Sort files by the start of their run, newest first, then others; leave out missing ones."""
    times = {}
    for path in files:
        with suppress(FileNotFoundError, NotADirectoryError):
            times[path] = (start_time(path.parent), path.stat().st_mtime_ns)
    return sorted(times, key=lambda path: times[path], reverse=True)


def find_run(resume: str, outputs: str) -> Path:
    """Return the run folder for `resume`: a folder, one of its checkpoints, or `latest`."""
    if resume == "latest":
        return all_runs(Path(outputs))[-1]
    folder = Path(resume)
    with reading(f"resume={resume}"):
        folder = folder.parent if folder.is_file() else folder
        if not (folder / CONFIG).is_file():
            raise UserError(f"resume={resume}: not a run folder (no {folder / CONFIG})")
    return folder


def find_checkpoint(outputs: str | Path, name: str = "best.pt") -> Path:
    """Return the file `name` of the newest run under `outputs` that has it, or raise a UserError.

    Print the path and the status of its run on stderr, and the newest run if that lacks the file.
    """
    runs, files = find_runs(Path(outputs)), newest_first(find_files(Path(outputs), name))
    if not files:
        raise UserError(f"no run under {_describe(Path(outputs))} has a {name}: {REMEDIES[name]}")
    path, message = files[0], f"using {files[0]}"
    if start_time(path.parent):
        message += f" ({read_summary(path.parent)['status']})"
    if runs and start_time(runs[-1]) > start_time(path.parent):
        status = read_summary(runs[-1])["status"]
        message += f"; skipped the newer run {runs[-1]} ({status}), which has no {name}"
    print(message, file=sys.stderr)
    return path


def network_file(path: str | Path, name: str, key: str = "checkpoint") -> Path:
    """Return `path`, the value of the setting `key`; for a folder, its file `name`.

    Raise a UserError with a hint if the file is missing or unreadable.
    """
    path = Path(path)
    file = path / name if os.path.isdir(path) else path  # noqa: PTH112 (False if it is unreadable)
    with reading(f"{key}={file}"), suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(file.stat().st_mode):  # reading a named pipe would wait for a writer
            raise UserError(f"{key}={file}: not a regular file")
        file.open("rb").close()
        return file
    if file == path:
        raise UserError(f"{key}={path}: no such file")
    runs = newest_first(find_files(path, name, key))
    hint = f"did you mean {key}={runs[0].parent}?" if runs else REMEDIES[name]
    if name == "best.pt" and (last := path / "last.pt").is_file():
        hint = f"did you mean {key}={last}?"
    raise UserError(f"{key}={path}: no {name} in this folder, {hint}")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in `folder` as nested plain values."""
    settings = _read(folder / CONFIG, _parse_yaml, RunSettings)
    if "model" in settings:
        settings["model"] = own_settings(settings["model"])
    return settings


def data_root(folder: Path, asked: str | None) -> str:
    """Return the folder of the data sets: `asked`, that of the run in `folder`, or the default."""
    if asked is None and (folder / CONFIG).is_file():
        asked = flatten(read_settings(folder)).get("data.root")
        asked = asked if isinstance(asked, str) and Path(asked).is_dir() else None
    return asked or os.environ.get("DATA_ROOT", "data")


def own_settings(network: dict[str, Any]) -> dict[str, Any]:
    """Drop settings of other networks, which version 0.1.0 also wrote."""
    name = network.get("name", "lenet")
    return {"name": name} if name == "lltm" else {"name": name} | network


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the `summary.json` of the run in `folder`.

    The status is running if another process holds the lock; otherwise unfinished if the run was
    killed, or if the file is damaged.
    """
    path, summary = folder / SUMMARY, {"status": "unfinished"}
    if path.is_file():
        try:
            summary |= _read(path, json.loads, Summary)
        except UserError as error:
            remedy = f"the run counts as unfinished, resume={folder} writes the file anew"
            warn_once(f"{error}; {remedy}")
    if summary["status"] == "unfinished" and is_running(folder):
        summary["status"] = "running"
    return summary


@functools.cache
def warn_once(message: str) -> None:
    """Print a warning on stderr; do nothing if it was printed before."""
    print(f"WARNING: {message}", file=sys.stderr)


def _read(path: Path, parse: Callable[[str], Any], schema: type[Any]) -> dict[str, Any]:
    """Parse a file to a dict that fits `schema`; raise a UserError if that fails."""
    try:
        values = parse(_read_text(path))
        if not isinstance(values, dict):
            raise ValueError("must be a mapping")
        json.dumps(values)  # raises for other types than those of JSON
        from_mapping(schema, values)
        return values
    except Exception as error:  # the parsers raise many types
        raise UserError(f"{path}: cannot be read: {printable(one_line(error))}") from error


def _read_text(path: Path) -> str:
    """Return a text in UTF-8; raise a ValueError if it has more than `MAX_TEXT` bytes.

    Raise a ValueError for named pipes and devices, which may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise ValueError(f"has more than {MAX_TEXT:,} bytes")
    return content.decode()


def _parse_yaml(text: str) -> Any:
    """Parse YAML; raise a ValueError for aliases, which may nest exponentially."""
    if "*" in text and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("must not have aliases")
    return OmegaConf.to_container(OmegaConf.create(text))


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries or dataclasses to one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in (values if isinstance(values, dict) else dataclasses.asdict(values)).items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
