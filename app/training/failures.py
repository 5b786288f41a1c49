"""Conversion of expected failures of a run to RunErrors, which name its last checkpoint."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from app.config.environment import read_torchrun
from app.config.errors import RunError, WriteError, is_out_of_memory, one_line
from app.runs.checkpoint import BEST, LAST
from app.training.distributed import LostPeerError

if TYPE_CHECKING:
    from app.training.state import Run


@contextmanager
def expected_failures(run: "Run | None" = None) -> Iterator[None]:
    """Convert expected failures (out of memory, full disk, lost peer) to RunError."""
    try:
        yield
    except (WriteError, RuntimeError, MemoryError) as error:
        when = f"at step {run.step}" if run else "before the first step"
        size = run.world.size if run else read_torchrun().size
        reason = one_line(str(error).partition("\n")[0])  # C++ frames may follow
        if isinstance(error, WriteError):
            message = str(error)
        elif is_out_of_memory(error):
            message = f"out of memory {when}"
            if run:
                batch_size = f"trainer.batch_size={run.schedule.batch_size}"
                message += f" on {run.device} with {batch_size}: try a smaller one"
        elif isinstance(error, LostPeerError) or (size > 1 and is_connection_error(error)):
            message = (
                "lost the connection to another process" if run else "no connection to the others"
            )
            message = f"{message} {when}: {reason}".removesuffix(": ")
        else:
            raise
        raise RunError(f"{message} ({last_checkpoint(run)})" if run else message) from error


def is_connection_error(error: BaseException) -> bool:
    """Return whether a collective operation or the rendezvous failed."""
    known = isinstance(error, torch.distributed.DistError)
    return known or bool(re.search("gloo|nccl", str(error), re.IGNORECASE))


def not_finite(run: "Run", what: str, step: int) -> RunError:
    """Return the RunError for non-finite values at `step`, with the setting to change."""
    rate, decay = run.schedule.rate(step - 1), run.cfg.optim.weight_decay
    # a step multiplies the weights by 1 - lr * weight_decay: below -1 they grow and alternate
    lr = run.cfg.optim.lr
    setting = "weight_decay" if lr * decay > 2 and decay > lr else "lr"
    return RunError(
        f"{what} at step {step}, where the learning rate was {rate:.2g} and the weight decay "
        f"{decay:g}: try a smaller optim.{setting} ({last_checkpoint(run)})"
    )


def last_checkpoint(run: "Run") -> str:
    """Describe the last checkpoint, for error messages."""
    for path in (run.folder / LAST, run.folder / BEST):
        if path.is_file():
            return f"last checkpoint: {path}"
    return "there is no checkpoint yet"
