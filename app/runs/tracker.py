"""Curves of a run for TensorBoard."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from app.config.errors import writing
from app.config.schema import format_value

EVENTS = "events.out.tfevents.*"


@contextmanager
def quiet_writer_thread() -> Iterator[None]:
    """Suppress tracebacks of OSErrors in TensorBoard's thread, which `Tracker` raises, too."""
    hook = threading.excepthook
    threading.excepthook = lambda it: None if issubclass(it.exc_type, OSError) else hook(it)
    try:
        yield
    finally:
        threading.excepthook = hook


class Tracker:
    """The curves of a run; points after `step` are purged.

    All methods except `close` raise a WriteError on failure.
    """

    def __init__(self, folder: str | Path, step: int = 0) -> None:
        self._folder = Path(folder)
        with writing(self._folder):
            renumber_events(self._folder)
            self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each named curve."""
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def picture(self, name: str, pixels: NDArray[np.uint8], step: int) -> None:
        """Add a picture, RGB [H, W, 3]."""
        with writing(self._folder):
            self._writer.add_image(name, pixels, step, dataformats="HWC")

    def settings(self, values: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Add settings and results, keyed by the names of their curves, for the HParams tab."""
        settings = {
            key: value if isinstance(value, bool | int | float | str) else format_value(value)
            for key, value in values.items()
        }
        with writing(self._folder):
            for part in hparams(settings, dict(results)):
                self._writer._get_file_writer().add_summary(part, 0)

    def flush(self) -> None:
        """Write everything to the disk."""
        with writing(self._folder):
            self._writer.flush()
            for path in self._folder.glob(EVENTS):
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files; ignore errors, which `flush` has raised before."""
        with suppress(OSError):
            self._writer.close()


def renumber_events(folder: Path) -> None:
    """Rename event files if a new one would not sort after them; keep their order.

    TensorBoard reads files in the order of their names, which begin with the time, then host and
    process: out of order in the same second, or if the clock was set back.
    """
    names = sorted(path.name for path in folder.glob(EVENTS))
    if not names or names[-1] < EVENTS.replace("*", f"{int(time.time()):010d}"):
        return
    for number, name in enumerate(names):
        *_, rest = name.split(".", EVENTS.count(".") + 1)
        (folder / name).rename(folder / EVENTS.replace("*", f"{number:010d}.{rest}"))
