import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from app.config.device import keep_freed_memory, pick_device
from app.config.errors import RunError, WriteError
from app.config.schema import TrainConfig
from app.inference.predictor import evaluate
from app.runs.folder import locked, remove_temporaries
from app.runs.tracker import Tracker
from app.training.distributed import connect
from app.training.state import BEST, LAST, Run, finished, last_good, not_finite, save, start
from app.training.step import Steps
from app.training.summary import format_summary, introduction, log_results, summarize, test

# What an operator of ours runs into arrives as RuntimeError, before torch 2.13 without its reason.
OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|CUDA (error: )?out of memory|ALLOC_FAILED"
    r"|(aoti_torch_empty_strided|\"aten::(clone|contiguous)\").* API call failed",
    re.DOTALL,
)
ASK_EVERY = 50  # steps between two questions to the other processes
LOSS, CORRECT, NORM = range(3)  # what a step returns


def train(cfg: TrainConfig) -> dict[str, Any]:
    """Train as `cfg` says, test the best checkpoint once, and leave it all in a run folder.

    Returns:
        The summary, which is in the folder's `summary.json` too.

    Raises:
        UserError: The data, the device, the output folder or the run to resume cannot be used;
            nothing is written.
        RunError: The run could not go on.
        KeyboardInterrupt: The run was interrupted; `last.pt` holds what it had reached.
    """
    started = time.perf_counter()
    keep_freed_memory()
    device = pick_device(cfg.device)
    with closing(connect(device)) as world:
        try:
            run = start(cfg, world)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            raise RunError(f"out of memory on {device} before the first step") from error
        if summary := finished(run):
            if world.rank == 0:
                print(f"{run.folder} is finished: test accuracy {summary['test_accuracy']:.2%}")
            return summary
        if world.rank > 0:
            with deferred_interrupt() as interrupted, explained(run):
                fit(run, None, interrupted)
            return {}
        with locked(run.folder):
            print(introduction(run), flush=True)
            remove_temporaries(run.folder)
            with closing(Tracker(run.folder, run.logs)) as tracker:
                return lead(run, tracker, started)


def lead(run: Run, tracker: Tracker, started: float) -> dict[str, Any]:
    """Do what one of the processes does: train, write, test, and say how it ended."""
    try:
        with explained(run):
            with deferred_interrupt() as interrupted:
                fit(run, tracker, interrupted)
            results = test(run, tracker)
            log_results(run, tracker, results)
            tracker.flush()
    except KeyboardInterrupt:
        with suppress(RunError):  # of a disk that is full: it is stopped all the same
            summarize(run, "interrupted", seconds=time.perf_counter() - started)
        print(f"stopped after step {run.step:,} ({last_good(run)})", flush=True)
        raise
    except BrokenPipeError:  # of print, whose reader has had enough
        with suppress(RunError):
            summarize(run, "interrupted", seconds=time.perf_counter() - started)
        raise
    except Exception as error:
        with suppress(RunError):  # the disk may be what has failed
            summarize(run, "failed", error=" ".join(str(error).split()))
        raise
    results["seconds"] = time.perf_counter() - started
    summary = summarize(run, "finished", **results)
    print(format_summary(run, summary), flush=True)
    return summary


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """Say in a line what exceptions mean that are no mistakes of the program.

    Raises:
        RunError: There was not enough memory, no space on the disk, or another process has ended.
    """
    try:
        yield
    except WriteError as error:
        raise RunError(f"{error} ({last_good(run)})") from error
    except RuntimeError as error:
        if lacks_memory(error):
            raise RunError(
                f"out of memory on {run.device} with trainer.batch_size={run.batch_size}: "
                f"try a smaller one ({last_good(run)})"
            ) from error
        if run.world.size > 1 and re.search("gloo|nccl", str(error), re.IGNORECASE):
            raise RunError(
                f"process {run.world.rank} has lost the others at step {run.step} "
                f"({last_good(run)})"
            ) from error
        raise


def lacks_memory(error: RuntimeError) -> bool:
    """Whether an exception says that there was not enough memory."""
    return isinstance(error, torch.OutOfMemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


def fit(run: Run, tracker: Tracker | None, interrupted: Callable[[], bool]) -> None:
    """Train for all epochs; after each write `last.pt`, and `best.pt` if none was better.

    Args:
        run: The run, which may have come some way.
        tracker: Where curves go; None in a process that does not write.
        interrupted: Whether the run is to stop.

    Raises:
        KeyboardInterrupt: The run was to stop; it has been saved.
    """
    quiet = None if tracker else True  # None: where there is a terminal
    steps = Steps(run)
    with closing(tqdm(total=run.steps, unit="step", disable=quiet, leave=False)) as bar:
        bar.update(run.step)
        while run.epoch < run.epochs:
            loss, accuracy, speed = train_epoch(run, steps, tracker, interrupted, bar)
            val_loss, val_accuracy = evaluate(run.learner.trained, run.data.val, run.data)
            run.epoch, run.points = run.epoch + 1, []
            best, run.best = val_accuracy >= run.best, max(val_accuracy, run.best)
            if tracker:
                metrics = {"val_loss": val_loss, "val_accuracy": val_accuracy}
                tracker.scalars(
                    run.step,
                    {"accuracy/train": accuracy, "images_per_second": speed}
                    | {"loss/val": val_loss, "accuracy/val": val_accuracy},
                )
                if best:
                    save(run, BEST, **metrics)
                keep(run, tracker, **metrics)
                bar.write(
                    f"epoch {run.epoch:{len(str(run.epochs))}}/{run.epochs}  loss {loss:.4f}  "
                    f"accuracy {accuracy:.2%}  validation {val_accuracy:.2%}  "
                    f"{speed:,.0f} images/s"
                )
                sys.stdout.flush()  # a pipe should see each epoch when it ends
            if run.world.any(run.device, interrupted())[0]:
                raise KeyboardInterrupt


def train_epoch(
    run: Run,
    steps: Steps,
    tracker: Tracker | None,
    interrupted: Callable[[], bool],
    bar: "tqdm[Any]",
) -> tuple[float, float, float]:
    """Go on to the end of this epoch: its (mean loss, accuracy, images a second).

    What the steps return stays on the device until it is noted, when the run is saved.
    """
    count, images, seconds = run.epoch_steps, run.images, run.seconds
    run.learner.model.train()
    steps.begin(run.epoch, len(run.points))
    while len(run.points) < count:
        with timed(run):
            stop = take_steps(run, steps, interrupted, bar)
            note(run, tracker, steps.returned)
        if tracker and len(run.points) < count:
            keep(run, tracker)
        if stop:
            raise KeyboardInterrupt
    loss = sum(point[LOSS] for point in run.points) / count
    correct = sum(point[CORRECT] for point in run.points)
    speed = (run.images - images) / (run.seconds - seconds)
    return loss, correct / (count * run.batch_size), speed


@contextmanager
def timed(run: Run) -> Iterator[None]:
    """Count what is done in it as training."""
    begin = time.perf_counter()
    yield
    run.seconds += time.perf_counter() - begin


def take_steps(run: Run, steps: Steps, interrupted: Callable[[], bool], bar: "tqdm[Any]") -> bool:
    """Take steps to the end of the epoch, or until the run is to be saved: whether it must stop."""
    trainer, world, end = run.cfg.trainer, run.world, (run.epoch + 1) * run.epoch_steps
    saved_step, saved_time = run.step, time.monotonic()
    while True:
        steps.take()
        run.step += 1
        bar.update()
        if run.step == end:
            return False
        if world.size == 1 or run.step % ASK_EVERY == 0:
            late = past(time.monotonic() - saved_time, trainer.checkpoint_seconds)
            stop, late = world.any(run.device, interrupted(), late)
            if stop or late or past(run.step - saved_step, trainer.checkpoint_steps):
                return stop


def past(value: float, limit: float | None) -> bool:
    """Whether a value has come to its limit; None: there is none."""
    return limit is not None and value >= limit


def note(run: Run, tracker: Tracker | None, returned: Tensor) -> None:
    """Fetch what the steps since the last time have returned, check it and log it.

    Raises:
        RunError: A loss or gradient was not a finite number.
    """
    done = len(run.points)
    points = run.world.sum(returned[done : run.step - run.epoch * run.epoch_steps].clone())
    points[:, [LOSS, NORM]] /= run.world.size
    run.points += points.tolist()
    run.images += len(points) * run.batch_size
    check(run, done)
    if tracker:
        log(run, tracker, done)


def check(run: Run, done: int) -> None:
    """Raise a RunError if a step after the first `done` ones of this epoch has left the numbers."""
    kinds = (LOSS,) if run.learner.loss_scale else (LOSS, NORM)  # float16 skips what overflows
    for index, point in enumerate(run.points[done:], done):
        if not all(math.isfinite(point[kind]) for kind in kinds):
            what = f"the loss is {point[LOSS]}"
            if math.isfinite(point[LOSS]):
                what = f"the gradient's norm is {point[NORM]}"
            raise not_finite(run, what, run.epoch * run.epoch_steps + index + 1)


def log(run: Run, tracker: Tracker, done: int) -> None:
    """Add to the curves what came after the first `done` steps of this epoch.

    Every `log_every` steps make a point, and what is left at the end of the epoch a last one: the
    means of loss and norm, and the last rate. Steps that float16 skipped have no norm.
    """
    every, begin, end = run.cfg.trainer.log_every, run.epoch * run.epoch_steps, len(run.points)
    stops = list(range((done // every + 1) * every, end + 1, every))
    if end == run.epoch_steps and end % every:
        stops.append(end)
    for stop in stops:
        window = run.points[(stop - 1) // every * every : stop]
        values = {
            "loss/train": sum(point[LOSS] for point in window) / len(window),
            "learning_rate": run.rate(begin + stop - 1),
        }
        norms = [point[NORM] for point in window if math.isfinite(point[NORM])]
        if norms:
            values["gradient_norm"] = sum(norms) / len(norms)
        tracker.scalars(begin + stop, values)


def keep(run: Run, tracker: Tracker, **metrics: float) -> None:
    """Write `last.pt`, once the curves up to it are on the disk."""
    run.logs = tracker.flush()
    save(run, LAST, **metrics)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C and SIGTERM back until the program is at a place where it can stop.

    Yields:
        A function that says whether a signal has come. A second signal raises KeyboardInterrupt
        at once.
    """
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield lambda: noted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
