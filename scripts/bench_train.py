"""Measure the training step against three PyTorch loops, in one process on the same data.

    python scripts/bench_train.py [--device cuda|cpu] [--act relu] [--batch-size 128] [--seeds 5]

(a) as in pytorch/examples: torchvision's data set, ToTensor, Normalize, DataLoader, nn layers,
    AdamW, OneCycleLR;
(b) the layers, optimizer and schedule of (a), with the images resident on the device, eager;
(c) (b) under torch.compile;
(d) the training step of `python -m app.train`.

Images/s: the best of several rounds in turns, all with AdamW, after compilation and warm-up. Time
to 99 %: complete runs of (d) with Muon, a run for each seed; seconds of the training steps, and
accuracy on the test images at the end.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import this checkout

import torch
from bench.stock import StockGELU, StockNCReLU
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from app.config.device import describe, keep_freed_memory, pick_device
from app.config.schema import DataConfig, LeNetConfig, OptimConfig, TrainConfig, TrainerConfig
from app.data.datasets import load_dataset
from app.data.transforms import normalize
from app.inference.predictor import evaluate
from app.models import build_model, cpu_format
from app.training.distributed import World
from app.training.step import TrainStep


def stock_network(act: str) -> nn.Module:
    """Build the project's LeNet from PyTorch layers."""
    widen = 2 if act == "ncrelu" else 1
    activation = {"relu": nn.ReLU, "gelu": StockGELU, "ncrelu": StockNCReLU}[act]()
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.MaxPool2d(2), activation,
        nn.Conv2d(6 * widen, 16, 5), nn.MaxPool2d(2), activation, nn.Flatten(),
        nn.Linear(400 * widen, 120), activation,
        nn.Linear(120 * widen, 84), activation, nn.Linear(84 * widen, 10),
    )  # fmt: skip


class Pictures(Dataset[tuple[Tensor, int]]):
    """Data set like torchvision's MNIST: PIL images through transforms, one at a time."""

    def __init__(self, run: TrainStep) -> None:
        self.images = run.data.train.images.cpu().squeeze(1).numpy()
        self.labels = run.data.train.labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.ToTensor(),
                transforms.Normalize((run.data.mean,), (run.data.std,)),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def make_step(args: argparse.Namespace, optim: OptimConfig, seed: int = 0) -> TrainStep:
    """Build the training step of `python -m app.train`, without a run folder."""
    device = pick_device(args.device)
    cfg = TrainConfig(
        model=LeNetConfig(args.act),
        data=DataConfig(fallback=None),
        optim=optim,
        trainer=TrainerConfig(epochs=args.epochs, batch_size=args.batch_size),
        seed=seed,
    )
    data = load_dataset(cfg.data).to(device)
    torch.manual_seed(seed)
    model = build_model(cfg.model, 10).to(device)
    if device.type == "cpu":
        model.to(memory_format=cpu_format(cfg.model))
    return TrainStep(model, data, cfg, device, World())


def stock_step(run: TrainStep, compiled: bool) -> Callable[[Tensor, Tensor], None]:
    """Build the step of (b), or of (c) if `compiled`."""
    model = stock_network(run.cfg.model.act).to(run.device)
    optim = run.cfg.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optim.lr, total_steps=1_000_000)
    forward = torch.compile(model) if compiled else model

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(images), labels, label_smoothing=optim.label_smoothing)
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


def begin(steps: TrainStep, epoch: int) -> None:
    """Begin an epoch of (d) with deterministic cuDNN, as app.train does."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        steps.begin(epoch, 0)


def candidates(run: TrainStep) -> dict[str, Iterator[None]]:
    """Return an endless iterator of training steps for each of (a) to (d)."""
    data, size, device = run.data, run.schedule.batch_size, run.device

    def examples() -> Iterator[None]:
        step = stock_step(run, compiled=False)
        options = {"num_workers": 1, "pin_memory": True} if device.type == "cuda" else {}
        loader = DataLoader(Pictures(run), size, shuffle=True, drop_last=True, **options)
        for images, labels in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield step(images.to(device), labels.to(device))

    def resident(compiled: bool) -> Iterator[None]:
        step = stock_step(run, compiled)
        while True:
            order = torch.randperm(len(data.train), device=device)
            for batch in order[: run.schedule.epoch_steps * size].split(size):
                images = normalize(data.train.images[batch], data.mean, data.std)
                yield step(images, data.train.labels[batch])

    def ours() -> Iterator[None]:
        while True:
            begin(run, 0)
            for _ in range(run.schedule.epoch_steps):
                yield run.take()

    return {
        "(a) DataLoader and transforms": examples(),
        "(b) resident, eager": resident(compiled=False),
        "(c) resident, torch.compile": resident(compiled=True),
        "(d) ours": ours(),
    }


def rate(steps: Iterator[None], count: int, run: TrainStep) -> float:
    """Return images/s over `count` steps."""
    _synchronize(run)
    started = time.perf_counter()
    for _ in range(count):
        next(steps)
    _synchronize(run)
    return count * run.schedule.batch_size / (time.perf_counter() - started)


def compare(args: argparse.Namespace, run: TrainStep) -> None:
    """Print the images/s of (a) to (d)."""
    ways = candidates(run)
    for steps in ways.values():
        rate(steps, 10, run)
    best = dict.fromkeys(ways, 0.0)
    for _ in range(args.rounds):
        for name, steps in ways.items():
            best[name] = max(best[name], rate(steps, args.steps, run))
    print("| way | images/s | ours is faster by |\n|---|---|---|")
    for name, speed in best.items():
        print(f"| {name} | {speed:,.0f} | {best['(d) ours'] / speed:.2f}× |", flush=True)


def train_run(args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Train a network by (d); return seconds of the steps and test accuracy."""
    run = make_step(args, OptimConfig(lr=args.lr), seed)
    run.model.train()
    begin(run, 0)
    _synchronize(run)
    started = time.perf_counter()
    for epoch in range(args.epochs):
        if epoch:
            begin(run, epoch)
        for _ in range(run.schedule.epoch_steps):
            run.take()
    _synchronize(run)
    seconds = time.perf_counter() - started
    return seconds, evaluate(run.trained, run.data.test, run.data)[1]


def _synchronize(run: TrainStep) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run the benchmark and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--act", default="relu", choices=["relu", "gelu", "ncrelu"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1, help="of the complete runs")
    parser.add_argument("--lr", type=float, default=0.02, help="of the complete runs")
    parser.add_argument("--rounds", type=int, default=7, help="0: no comparison")
    parser.add_argument("--steps", type=int, default=40, help="a round")
    parser.add_argument("--seeds", type=int, default=5, help="complete runs")
    args = parser.parse_args()

    keep_freed_memory()
    run = make_step(args, OptimConfig("adamw", lr=0.008))
    print(f"LeNet with {args.act}, batch {run.schedule.batch_size}, {describe(run.device)}\n")
    if args.rounds:
        compare(args, run)
    if args.seeds:
        results = [train_run(args, seed) for seed in range(args.seeds)]
        seconds, accuracies = zip(*results, strict=True)
        reached = sum(accuracy >= 0.99 for accuracy in accuracies)
        print(
            f"\n{args.epochs} epochs, {args.seeds} seeds: {statistics.mean(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}), test accuracy "
            f"{statistics.mean(accuracies):.2%} ({min(accuracies):.2%} to {max(accuracies):.2%}), "
            f"{reached} of {args.seeds} reach 99 %"
        )


if __name__ == "__main__":
    main()
