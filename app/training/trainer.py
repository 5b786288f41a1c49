"""The training loop of `python -m app.train`: epochs of steps, checkpoints, the final test."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from tqdm import tqdm

from app.config.device import keep_freed_memory
from app.config.errors import RunError, one_line
from app.config.process import handle_signals
from app.config.schema import TrainConfig
from app.inference.predictor import evaluate
from app.runs.checkpoint import BEST, LAST
from app.runs.tracker import Tracker, quiet_writer_thread
from app.training.distributed import connect
from app.training.failures import expected_failures, last_checkpoint, not_finite
from app.training.state import Run, save, start
from app.training.step import LOSS, NORM
from app.training.summary import (
    describe_run,
    format_summary,
    log_results,
    summarize,
    test,
)

# steps between all-reduces of the interrupt and checkpoint flags; 1 with trainer.compile=false
ALL_REDUCE_EVERY = 50


def train(
    cfg: TrainConfig, typed: Mapping[str, str] = MappingProxyType({}), folder: Path | None = None
) -> dict[str, Any]:
    """Train a network and test its best checkpoint once; return `summary.json` ({} in other ranks).

    With `cfg.resume`, the run keeps its own configuration and takes only the settings in `typed`
    from `cfg`: overrides of the command line by key or group, such as `{"seed": "seed=1"}`.
    `folder` is that of a new run (None: a new one under `cfg.outputs`).

    Raises:
        UserError: A setting is invalid; nothing is written.
        RunError: The run failed: out of memory, full disk, lost peer, non-finite loss.
        KeyboardInterrupt: The run was interrupted; `last.pt` holds its state.
    """
    started = time.perf_counter()
    keep_freed_memory()
    with ExitStack() as stack:
        with expected_failures():
            world = stack.enter_context(connect())
            run = start(cfg, world, stack, typed, folder)
        if isinstance(run, dict):  # the summary of a finished run
            return run
        if world.rank > 0:
            with expected_failures(run):
                fit(run, None)
            return {}
        print(describe_run(run), flush=True)
        stack.enter_context(quiet_writer_thread())
        tracker = stack.enter_context(closing(Tracker(run.folder, run.step)))
        return run_rank_0(run, tracker, started - run.seconds)  # training before a resume


def run_rank_0(run: Run, tracker: Tracker, started: float) -> dict[str, Any]:
    """Run rank 0: train, test, log, summarise."""
    try:
        with expected_failures(run):
            summarize(run, "unfinished")  # describes the run if it is killed
            fit(run, tracker)
            logits, results = test(run)
            seconds = time.perf_counter() - started
            summary = summarize(run, "finished", **results, seconds=seconds)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        with suppress(RunError):  # a full disk
            summarize(run, "interrupted", seconds=time.perf_counter() - started)
        if isinstance(error, KeyboardInterrupt):
            stopped = f"stopped after step {run.step:,} ({last_checkpoint(run)})"
            print(f"{stopped}: continue with resume={run.folder}", flush=True)
        raise
    except Exception as error:
        with suppress(RunError):  # a full disk
            summarize(run, "failed", error=one_line(error))
        raise
    log_results(run, tracker, logits, results)
    print(format_summary(run, summary), flush=True)
    return summary


def fit(run: Run, tracker: Tracker | None) -> None:
    """Train to the last epoch; after each, write `last.pt` and, if it is the best, `best.pt`.

    If a signal arrives, write `last.pt` and raise KeyboardInterrupt.
    """
    epochs = run.schedule.epochs
    quiet = None if tracker else True  # None: show the bar on terminals only
    bar = tqdm(total=run.schedule.steps, unit="step", disable=quiet, leave=False)
    with closing(bar), deferred_interrupt() as interrupted:
        bar.update(run.step)
        while run.epoch < epochs:
            loss, accuracy, speed = train_epoch(run, tracker, interrupted, bar)
            val_loss, val_accuracy = evaluate(run.train_step.trained, run.data.val, run.data)
            run.epoch, run.statistics = run.epoch + 1, run.statistics[:0]
            best, run.best = val_accuracy >= run.best, max(val_accuracy, run.best)
            if tracker:
                curves = {"accuracy/train": accuracy, "images_per_second": speed}
                curves |= {"loss/val": val_loss, "accuracy/val": val_accuracy}
                tracker.scalars(run.step, curves)
                if best:
                    save(run, BEST, val_loss=val_loss, val_accuracy=val_accuracy)
                save_last(run, tracker, val_loss=val_loss, val_accuracy=val_accuracy)
                bar.write(
                    f"epoch {run.epoch:{len(str(epochs))}}/{epochs}  loss {loss:.4f}  "
                    f"accuracy {accuracy:.2%}  validation {val_accuracy:.2%}  {speed:,.0f} images/s"
                )
                if sys.stdout:  # None: closed
                    sys.stdout.flush()  # for pipes
            if run.world.any(interrupted())[0]:
                raise KeyboardInterrupt


def train_epoch(
    run: Run, tracker: Tracker | None, interrupted: Callable[[], bool], bar: "tqdm[Any]"
) -> tuple[float, float, float]:
    """Train to the end of the epoch; return its mean loss, accuracy and images per second."""
    count, images, seconds = run.schedule.epoch_steps, run.images, run.seconds
    run.train_step.model.train()
    run.train_step.begin(run.epoch, len(run.statistics))
    while len(run.statistics) < count:
        begin = time.perf_counter()
        stop = take_steps(run, interrupted, bar)
        done = len(run.statistics)
        fetch_statistics(run, interrupted)
        run.seconds += time.perf_counter() - begin
        check_finite(run, done)
        if tracker:
            log_statistics(run, tracker, done)
            if len(run.statistics) < count:
                save_last(run, tracker)
        if stop:
            raise KeyboardInterrupt
    loss, correct, _ = run.statistics.double().mean(0).tolist()
    speed = (run.images - images) / (run.seconds - seconds)
    return loss, correct / run.schedule.batch_size, speed


def take_steps(run: Run, interrupted: Callable[[], bool], bar: "tqdm[Any]") -> bool:
    """Train to the next checkpoint or the end of the epoch; return whether to stop the run."""
    trainer, alone = run.cfg.trainer, run.world.size == 1
    end = (run.epoch + 1) * run.schedule.epoch_steps
    saved_step, saved_time = run.step, time.monotonic()
    # eager steps fill the queue of the GPU, where the host would wait for a lost peer for ever
    every = 1 if trainer.compile is False else ALL_REDUCE_EVERY
    while True:
        run.train_step.take()
        run.step += 1
        bar.update()
        if run.step == end:
            return False
        due, stop = run.step - saved_step >= (trainer.checkpoint_steps or math.inf), False
        if alone or run.step % every == 0:  # signals and clocks differ between processes
            late = time.monotonic() - saved_time >= (trainer.checkpoint_seconds or math.inf)
            stop, late = run.world.any(interrupted(), late)
            due = due or stop or late
        if due:
            return stop


def fetch_statistics(run: Run, interrupted: Callable[[], bool]) -> None:
    """Reduce the statistics of new steps over all ranks and append them to `run.statistics`."""
    first, done = run.epoch * run.schedule.epoch_steps, len(run.statistics)
    new = run.world.sum(run.train_step.statistics[done : run.step - first].clone())
    new = run.world.to_cpu(new, interrupted)
    new[:, [LOSS, NORM]] /= run.world.size
    run.statistics = torch.cat([run.statistics, new])
    run.images += len(new) * run.schedule.batch_size


def check_finite(run: Run, done: int) -> None:
    """Raise RunError for a non-finite loss or gradient in the epoch's steps after `done`."""
    is_finite = run.statistics[done:, [LOSS, NORM]].isfinite().all(1)
    if is_finite.all():
        return
    index = done + int(is_finite.int().argmin())  # of the first
    loss, _, norm = run.statistics[index].tolist()
    what = f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    raise not_finite(run, what, run.epoch * run.schedule.epoch_steps + index + 1)


def log_statistics(run: Run, tracker: Tracker, done: int) -> None:
    """Log the epoch's steps after `done`: means over `log_every` steps, fewer at its end."""
    every, count = run.cfg.trainer.log_every, run.schedule.epoch_steps
    begin = run.epoch * count
    for stop in range(done + 1, len(run.statistics) + 1):
        if stop % every and stop < count:
            continue
        window = run.statistics[(stop - 1) // every * every : stop].double()
        values = {
            "loss/train": window[:, LOSS].mean().item(),
            "learning_rate": run.schedule.rate(begin + stop - 1),
            "gradient_norm": window[:, NORM].mean().item(),
        }
        tracker.scalars(begin + stop, values)


def save_last(run: Run, tracker: Tracker, **metrics: float) -> None:
    """Flush the curves, then write `last.pt`."""
    tracker.flush()
    save(run, LAST, **metrics)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Record the first SIGINT, SIGTERM or SIGHUP; raise KeyboardInterrupt at the second.

    Yield a function that returns whether a signal has arrived. Ignored signals stay ignored.
    """
    arrived = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            raise KeyboardInterrupt
        arrived = True

    previous = handle_signals(handle)
    try:
        yield lambda: arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
