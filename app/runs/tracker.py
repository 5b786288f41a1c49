import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor, nn
from torch.utils.tensorboard import summary
from torch.utils.tensorboard._pytorch_graph import graph as trace_graph

from app.config.errors import WriteError

EVENTS, METRICS = "events.out.tfevents.*", "metrics.jsonl"


class Tracker:
    """The curves of a run, in its folder: TensorBoard events, and `metrics.jsonl` beside them.

    It writes events itself, by TensorBoard's own record format: torch's SummaryWriter does so in a
    thread of its own, which cannot say that the disk is full.

    Args:
        folder: The run's.
        sizes: What `flush` returned when the run was last saved. Its files are cut to that, so that
            a resumed run goes on as if it had never been stopped. Empty for a new run.

    Raises:
        WriteError: The files cannot be written.
    """

    def __init__(self, folder: str | Path, sizes: Mapping[str, int]) -> None:
        self._folder = Path(folder)
        unique = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            for path in self._paths():
                if path.name not in sizes:
                    path.unlink(missing_ok=True)
                elif path.stat().st_size > sizes[path.name]:
                    os.truncate(path, sizes[path.name])
            # a file of its own: a TensorBoard that is reading the old one would lose its place
            self._events = (self._folder / EVENTS.replace("*", unique)).open("wb")
            self._lines = (self._folder / METRICS).open("a")
        except OSError as error:
            raise self._cannot_be_written(error) from error
        self._records = RecordWriter(self._events)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each of the named curves, and one object to `metrics.jsonl`.

        Raises:
            WriteError: It cannot be written; as with all the methods.
        """
        try:
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise self._cannot_be_written(error) from error
        for name, value in values.items():
            self._add(step, summary.scalar(name, value))

    def picture(self, step: int, name: str, picture: NDArray[np.uint8]) -> None:
        """Add an RGB picture uint8 [H, W, 3]."""
        self._add(step, summary.image(name, picture, dataformats="HWC"))

    def precision_recall(
        self, step: int, classes: Sequence[str], labels: Tensor, probabilities: Tensor
    ) -> None:
        """Add a curve for each class: it against the others, by its column of [N, classes]."""
        for index, name in enumerate(classes):
            truth, column = (labels == index).numpy(), probabilities[:, index].numpy()
            self._add(step, summary.pr_curve(f"class/{name}", truth, column))

    def graph(self, model: nn.Module, example: Tensor) -> None:
        """Add the network's graph, as tracing it on `example` shows it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tracing, which torch is giving up
            graph, _ = trace_graph(model, (example,))
        self._write(Event(wall_time=time.time(), graph_def=graph.SerializeToString()))

    def settings(self, values: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Add what the HParams tab compares: settings, and results by the names of their curves."""
        settings = {key: "null" if value is None else value for key, value in values.items()}
        for part in summary.hparams(settings, dict(results)):
            self._add(0, part)

    def flush(self) -> dict[str, int]:
        """Bring all that was added to the disk: the sizes of the files, in bytes."""
        try:
            for file in (self._events, self._lines):
                file.flush()
                os.fsync(file.fileno())
            return {path.name: path.stat().st_size for path in self._paths()}
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def close(self) -> None:
        """Close the files; what could not be written was `flush`'s to say."""
        for file in (self._events, self._lines):
            with suppress(OSError):
                file.close()

    def _paths(self) -> list[Path]:
        return [*self._folder.glob(EVENTS), *self._folder.glob(METRICS)]

    def _add(self, step: int, content: Summary) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=content))

    def _write(self, event: Event) -> None:
        try:
            self._records.write(event.SerializeToString())
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def _cannot_be_written(self, error: OSError) -> WriteError:
        return WriteError(f"{self._folder}: cannot be written: {error.strerror}")
