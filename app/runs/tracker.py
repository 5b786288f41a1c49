"""Curves of a run: TensorBoard events and JSON lines."""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from app.config.errors import writing
from app.config.schema import format_value

EVENTS, METRICS, RESULTS = "events.out.tfevents.*", "metrics.jsonl", ".results"


@contextmanager
def quiet_writer_thread() -> Iterator[None]:
    """Suppress tracebacks of OSErrors in TensorBoard's thread, which `Tracker` raises, too."""
    hook = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if not issubclass(failure.exc_type, OSError):
            hook(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = hook


class Tracker:
    """The curves of a run: TensorBoard events, and the same scalars in `metrics.jsonl`.

    Test results go to a separate event file, which replaces that of an earlier test of the run, so
    that a resumed run has each point once. All methods except `close` raise a WriteError if the
    files cannot be written.

    Args:
        folder: The run folder.
        step: The last step of the checkpoint; points of later steps are purged.
        size: Size of `metrics.jsonl` in bytes at that step, as `flush` returned it.
    """

    def __init__(self, folder: str | Path, step: int = 0, size: int = 0) -> None:
        self._folder = Path(folder)
        self._results: SummaryWriter | None = None
        with writing(self._folder):
            self._lines = (self._folder / METRICS).open("a")
            self._lines.truncate(size)
            self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def scalars(self, step: int, values: Mapping[str, float], results: bool = False) -> None:
        """Add a point to each named curve, and a line with all values to `metrics.jsonl`."""
        with writing(self._folder):
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
            writer = self.results if results else self._writer
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    @property
    def results(self) -> SummaryWriter:
        """The writer of the test results; deletes the results of earlier processes."""
        if self._results is None:
            for path in self._folder.glob(EVENTS + RESULTS):
                path.unlink()
            self._results = SummaryWriter(str(self._folder), filename_suffix=RESULTS)
        return self._results

    def settings(self, values: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Add settings and results, keyed by the names of their curves, for the HParams tab."""
        settings = {
            key: value if isinstance(value, bool | int | float | str) else format_value(value)
            for key, value in values.items()
        }
        with writing(self._folder):
            for part in hparams(settings, dict(results)):
                self.results._get_file_writer().add_summary(part, 0)

    def flush(self) -> int:
        """Write everything to the disk; return the size of `metrics.jsonl` in bytes."""
        with writing(self._folder):
            self._lines.flush()
            os.fsync(self._lines.fileno())
            for writer in filter(None, (self._writer, self._results)):
                writer.flush()
            for path in self._folder.glob(EVENTS):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            return self._lines.tell()

    def close(self) -> None:
        """Close the files; ignore errors, which `flush` has raised before."""
        for file in (self._lines, self._writer, self._results):
            if file is not None:
                with suppress(OSError):
                    file.close()
