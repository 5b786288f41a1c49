import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from app.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from app.config import OptimConfig, TrainConfig
from app.data import Dataset, Split, load_dataset, normalize
from app.device import describe, pick_device
from app.errors import RunError
from app.files import write_atomically
from app.interrupt import deferred_interrupt
from app.model import build_model, count_parameters
from app.optimizer import AdamW
from app.runs import create_run_folder
from app.tracking import Tracker


@dataclass
class Run:
    """A training run: what it works with, and how far it has come."""

    cfg: TrainConfig
    data: Dataset  # on `device`
    model: nn.Module
    optimizer: AdamW
    device: torch.device
    folder: Path
    epoch: int = 0
    step: int = 0
    images: int = 0
    seconds: float = 0.0  # in training steps, without evaluation and checkpoints
    best: float = -1.0  # validation accuracy of best.pt

    @property
    def batch_size(self) -> int:
        """Images in a batch: a data set can be smaller than what was asked for."""
        return min(self.cfg.trainer.batch_size, len(self.data.train))

    @property
    def steps(self) -> int:
        """Steps of the whole run; what is left of an epoch after its last full batch is skipped."""
        return self.cfg.trainer.epochs * (len(self.data.train) // self.batch_size)


def train(cfg: TrainConfig) -> dict[str, Any]:
    """Train as `cfg` says, test the best checkpoint once, and leave it all in a run folder.

    Returns:
        The summary, which is in the folder's `summary.json` too.

    Raises:
        UserError: The data, the device or the output folder cannot be used; nothing is written.
        RunError: The run could not go on.
        KeyboardInterrupt: The run was interrupted; `last.pt` holds what it had reached.
    """
    started = time.perf_counter()
    run = start(cfg)
    with closing(Tracker(run.folder)) as tracker, deferred_interrupt() as interrupted:
        try:
            fit(run, tracker, interrupted)
        except KeyboardInterrupt:
            save(run, "last.pt")
            summarize(run, "interrupted", seconds=time.perf_counter() - started)
            print(f"stopped after step {run.step:,}: {run.folder / 'last.pt'}", flush=True)
            raise
        accuracy = test(run, tracker)
    seconds = time.perf_counter() - started
    summary = summarize(run, "finished", test_accuracy=accuracy, seconds=seconds)
    print(
        f"test accuracy {accuracy:.2%} in {seconds:.1f} s, "
        f"{summary['images_per_second']:,.0f} images/s: {run.folder / 'best.pt'}",
        flush=True,
    )
    return summary


def start(cfg: TrainConfig) -> Run:
    """Everything up to the first step; the run folder comes last, when nothing can be wrong."""
    device = pick_device(cfg.device)
    data = load_dataset(cfg.data)
    torch.manual_seed(cfg.seed)
    model = build_model(cfg.model, len(data.classes)).to(device)
    if device.type == "cpu":
        model.to(memory_format=torch.channels_last)  # 1.4 times as fast there
    optimizer = AdamW(model.parameters(), cfg.optim.weight_decay)
    parts = {part: getattr(data, part).to(device) for part in ("train", "val", "test")}
    data = dataclasses.replace(data, **parts)
    run = Run(cfg, data, model, optimizer, device, create_run_folder(cfg))
    print(
        f"{data.name}: {len(data.train):,} training, {len(data.val):,} validation, "
        f"{len(data.test):,} test images\n"
        f"LeNet with {cfg.model.act} and {cfg.model.conv} convolutions: "
        f"{count_parameters(model):,} parameters on {describe(device)}\n"
        f"writing to {run.folder}",
        flush=True,
    )
    return run


def fit(run: Run, tracker: Tracker, interrupted: Callable[[], None]) -> None:
    """Train for `trainer.epochs`; after each write `last.pt`, and `best.pt` if none was better."""
    epochs = run.cfg.trainer.epochs
    with closing(tqdm(total=run.steps, unit="step", disable=None, leave=False)) as bar:
        while run.epoch < epochs:
            loss, accuracy, speed = train_epoch(run, tracker, interrupted, bar)
            val_loss, val_accuracy = evaluate(run.model, run.data.val, run.data)
            tracker.scalars(run.step, {"loss/val": val_loss, "accuracy/val": val_accuracy})
            run.epoch += 1
            metrics = {"val_loss": val_loss, "val_accuracy": val_accuracy}
            save(run, "last.pt", **metrics)
            if val_accuracy >= run.best:
                run.best = val_accuracy
                save(run, "best.pt", **metrics)
            bar.write(
                f"epoch {run.epoch:{len(str(epochs))}}/{epochs}  loss {loss:.4f}  accuracy "
                f"{accuracy:.2%}  validation {val_accuracy:.2%}  {speed:,.0f} images/s"
            )
            sys.stdout.flush()  # a pipe should see each epoch when it ends


def train_epoch(
    run: Run, tracker: Tracker, interrupted: Callable[[], None], bar: "tqdm[Any]"
) -> tuple[float, float, float]:
    """One pass over the training images: (mean loss, accuracy, images a second)."""
    run.model.train()
    started, losses, rates = time.perf_counter(), [], []
    correct = torch.zeros((), dtype=torch.int64, device=run.device)
    for batch in shuffled_batches(run):
        interrupted()
        rates.append(one_cycle(run.step, run.steps, run.cfg.optim))
        loss, hits = train_step(run, batch, rates[-1])
        losses.append(loss)  # stays on the device: nothing waits for it before the epoch ends
        correct += hits
        run.step += 1
        bar.update()
    values, images = torch.stack(losses).tolist(), len(losses) * run.batch_size
    seconds = time.perf_counter() - started
    run.images, run.seconds = run.images + images, run.seconds + seconds
    log_steps(run, tracker, values, rates)
    accuracy, speed = correct.item() / images, images / seconds
    tracker.scalars(run.step, {"accuracy/train": accuracy, "images_per_second": speed})
    return sum(values) / len(values), accuracy, speed


def train_step(run: Run, batch: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """One step of the optimiser on the images `batch`, int64 [B]: (loss, number correct)."""
    data = run.data
    images, labels = data.train.images[batch], data.train.labels[batch]
    logits = run.model(normalize(images, data.mean, data.std))
    loss = F.cross_entropy(logits, labels, label_smoothing=run.cfg.optim.label_smoothing)
    loss.backward()
    run.optimizer.step(lr)
    return loss.detach(), (logits.argmax(1) == labels).sum()


def shuffled_batches(run: Run) -> Iterator[Tensor]:
    """Indices of the images of each batch of this epoch; the order follows from (seed, epoch)."""
    generator = torch.Generator().manual_seed((run.cfg.seed << 20) + run.epoch)
    order = torch.randperm(len(run.data.train), generator=generator).to(run.device)
    full = len(order) // run.batch_size * run.batch_size
    yield from order[:full].split(run.batch_size)


def one_cycle(step: int, steps: int, cfg: OptimConfig) -> float:
    """Learning rate of a step: cosine up to `cfg.lr` for `cfg.warmup` of the steps, then down to 0.

    After Smith and Topin (arXiv 1708.07120), with cosine flanks, from 1/25 of the top.
    """
    rise = cfg.warmup * steps
    if step < rise:
        low, share = cfg.lr / 25, step / rise
    else:
        low, share = 0.0, (steps - step) / (steps - rise)
    return low + (cfg.lr - low) * (1 - math.cos(math.pi * share)) / 2


@torch.no_grad()
def evaluate(
    model: nn.Module, split: Split, data: Dataset, batch_size: int = 1000
) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of `model` over a split of `data`."""
    model.eval()
    loss, correct = torch.zeros(2, device=split.labels.device)
    for images, labels in zip(
        split.images.split(batch_size), split.labels.split(batch_size), strict=True
    ):
        logits = model(normalize(images, data.mean, data.std))
        loss += F.cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
    return loss.item() / len(split), correct.item() / len(split)


def test(run: Run, tracker: Tracker) -> float:
    """Accuracy of `best.pt` on the test images, which is also noted in `best.pt`."""
    best = load_checkpoint(run.folder / "best.pt")
    run.model.load_state_dict(best.model)
    loss, accuracy = evaluate(run.model, run.data.test, run.data)
    best.metrics |= {"test_loss": loss, "test_accuracy": accuracy}
    save_checkpoint(run.folder / "best.pt", best)
    tracker.scalars(best.metrics["step"], {"loss/test": loss, "accuracy/test": accuracy})
    return accuracy


def log_steps(run: Run, tracker: Tracker, losses: list[float], rates: list[float]) -> None:
    """Log an epoch's loss and learning rate, the mean and the last of every `log_every` steps.

    Raises:
        RunError: A loss was not a finite number.
    """
    first, every = run.step - len(losses), run.cfg.trainer.log_every
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {first + index + 1}, where the learning rate was "
                f"{rates[index]:.2g}: try a smaller optim.lr (earlier checkpoints: {run.folder})"
            )
    for end in range(every, len(losses) + 1, every):
        mean = sum(losses[end - every : end]) / every
        tracker.scalars(first + end, {"loss/train": mean, "learning_rate": rates[end - 1]})


def save(run: Run, name: str, **metrics: float) -> None:
    """Write the run's state to the checkpoint `name` in its folder."""
    data = run.data
    save_checkpoint(
        run.folder / name,
        Checkpoint(
            model={key: value.cpu().contiguous() for key, value in run.model.state_dict().items()},
            model_config=dataclasses.asdict(run.cfg.model),
            data={
                "name": data.name,
                "classes": list(data.classes),
                "mean": data.mean,
                "std": data.std,
                "fallback_from": data.fallback_from,
                "val_size": len(data.val),
                "split_seed": run.cfg.data.split_seed,
            },
            metrics={"epoch": run.epoch, "step": run.step, **metrics},
            config=dataclasses.asdict(run.cfg),
        ),
    )


def summarize(run: Run, status: str, **metrics: float) -> dict[str, Any]:
    """Write `summary.json`, one flat object that scripts can read, and return it."""
    data, cfg = run.data, run.cfg
    summary = {
        "status": status,
        **metrics,
        "val_accuracy": run.best if run.best >= 0 else None,
        "images_per_second": run.images / run.seconds if run.seconds else None,
        "training_seconds": run.seconds,
        "epochs": run.epoch,
        "steps": run.step,
        "parameters": count_parameters(run.model),
        "act": cfg.model.act,
        "conv": cfg.model.conv,
        "seed": cfg.seed,
        "dataset": data.name,
        "fallback_from": data.fallback_from,
        "train_size": len(data.train),
        "val_size": len(data.val),
        "test_size": len(data.test),
        "device": describe(run.device),
        "torch": str(torch.__version__),
    }
    write_atomically(run.folder / "summary.json", json.dumps(summary, indent=2).encode())
    return summary
