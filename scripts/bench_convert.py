"""Measure the speed-up of models' training steps by `ops.convert_…`.

    python scripts/bench_convert.py [--model mobilenet_v2] [--dtype bfloat16] [--csv FILE]

Convolutions (`convert_depthwise`) and batch normalisation (`convert_batch_norm`) are converted.
Models: torchvision's for images; for sequences conformer (torchaudio's, 4 layers, 1024 steps of 512
features) and mamba (4 blocks without the scan, 2048 steps of 1024 features).

A step is forward, cross entropy, backward and SGD with momentum, on random samples resident on the
device. The original and the converted model take turns in one process, several steps at a time.
Reported are the median samples/s, the median ratio of a turn, and the share of the original's step
that its depthwise convolutions take alone, forward and backward. bfloat16 is autocast with float32
parameters; cuDNN runs in benchmark mode, TF32 has PyTorch's default. The converted model's loss and
gradients are first compared with the original's; if they differ, the exit code is 1.
"""

import argparse
import copy
import csv
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import this checkout

import torch
from bench import sequences
from bench.cases import FORMATS
from torch import Tensor, nn
from torch.nn import functional as F

import ops

MODELS = ("mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny")
BATCHES = {"images": 128, "sequences": 8}
CONVERSIONS = ("depthwise", "batch_norm")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLASSES = 1000
TOLERANCE = 1e-6  # relative error of loss and gradients in float64


@dataclass
class Row:
    """Samples/s of a model before and after the conversion, for one dtype and memory format.

    Attributes:
        share: of the original's step, the time of its depthwise convolutions alone.
    """

    model: str
    convert: str
    dtype: str
    format: str
    converted: int
    before_samples_per_s: float
    after_samples_per_s: float
    ratio: float
    share: float

    def line(self) -> str:
        """Return the row as text."""
        return (
            f"{self.model:20} {self.dtype:9} {self.format}  {self.converted:3} layers "
            f"{self.before_samples_per_s:10,.1f} -> {self.after_samples_per_s:10,.1f} samples/s  "
            f"{self.ratio:5.2f}x, depthwise {self.share:.0%} of the step"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    text = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=text[0], epilog=text[3])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    models = (*MODELS, *sequences.SHAPES)
    add("--model", choices=models, nargs="+", default=MODELS, help="default: those for images")
    add("--convert", choices=CONVERSIONS, nargs="+", default=CONVERSIONS, help="default: both")
    add("--dtype", choices=list(DTYPES), nargs="+", default=list(DTYPES), help="default: both")
    add("--format", choices=list(FORMATS), nargs="+", default=list(FORMATS), help="default: both")
    add("--batch", type=int, metavar="N", help="of a step (default: 128 images, 8 sequences)")
    add("--side", type=int, default=224, metavar="N", help="their height and width (default: 224)")
    add("--steps", type=int, default=5, metavar="N", help="steps in a turn (default: 5)")
    add("--turns", type=int, default=9, metavar="N", help="turns of each (default: 9)")
    add("--compile", action="store_true", help="both models through torch.compile")
    add("--csv", type=Path, metavar="FILE", help="write the numbers")
    args = parser.parse_args(argv)
    for name in ("batch", "side", "steps", "turns"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def build(args: argparse.Namespace, name: str, format: str) -> tuple[nn.Module, nn.Module, int]:
    """Return a model, its converted copy and the number of converted layers."""
    torch.manual_seed(0)
    if name in sequences.SHAPES:
        before = sequences.build(name, CLASSES).to(args.device).train()
    else:
        try:
            from torchvision import models
        except ImportError:
            raise SystemExit("this model needs torchvision") from None
        before = getattr(models, name)(weights=None, num_classes=CLASSES)
        before = before.to(args.device, memory_format=FORMATS[format]).train()
    after = copy.deepcopy(before)
    count = sum(getattr(ops, f"convert_{name}")(after) for name in args.convert)
    return before, after, count


def draw(args: argparse.Namespace, name: str, format: str) -> Tensor:
    """Return random images or sequences."""
    if name in sequences.SHAPES:
        batch = args.batch or BATCHES["sequences"]
        return torch.randn(batch, *sequences.SHAPES[name], device=args.device)
    shape = (args.batch or BATCHES["images"], 3, args.side, args.side)
    return torch.randn(shape, device=args.device).to(memory_format=FORMATS[format])


def depthwise_seconds(
    model: nn.Module, samples: Tensor, dtype: torch.dtype, args: argparse.Namespace
) -> float:
    """Return the time of the depthwise convolutions alone, forward and backward."""
    calls: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs[0])))
        for layer in model.modules()
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)) and 1 < layer.groups == layer.out_channels
    ]
    with torch.no_grad():
        model(samples)
    for hook in hooks:
        hook.remove()
    total = 0.0
    for layer, x in calls:
        twin = copy.deepcopy(layer).to(dtype)
        leaf = x.to(dtype).requires_grad_()
        output = twin(leaf)

        def step(twin: nn.Module = twin, leaf: Tensor = leaf, grad: Tensor = output) -> None:
            torch.autograd.grad(twin(leaf), [leaf, *twin.parameters()], grad.detach())

        seconds(step, 2, args.device)
        total += seconds(step, args.steps, args.device)
    return total


def is_same(before: nn.Module, after: nn.Module, samples: Tensor) -> bool:
    """Return whether loss and gradients agree in float64."""
    results = []
    for model in (before, after):
        twin = copy.deepcopy(model).double()
        torch.manual_seed(0)  # dropout, stochastic depth
        loss = twin(samples.double()).square().mean()
        grads = torch.autograd.grad(loss, list(twin.parameters()))
        results.append(torch.cat([loss.view(1), *(grad.flatten() for grad in grads)]))
    error = (results[0] - results[1]).norm() / results[0].norm()
    return bool(error <= TOLERANCE)


def make_step(
    model: nn.Module, samples: Tensor, labels: Tensor, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that runs one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    autocast = nullcontext if dtype == torch.float32 else torch.autocast
    autocast_args = () if dtype == torch.float32 else (samples.device.type, dtype)

    def step() -> None:
        with autocast(*autocast_args):
            loss = F.cross_entropy(model(samples), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], count: int, device: str) -> float:
    """Return the wall time of a step, averaged over `count` steps."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return (time.perf_counter() - start) / count


def measure(args: argparse.Namespace, model: str, dtype: str, format: str) -> Row | None:
    """Measure one row; return None if the converted model's results differ."""
    device = args.device
    before, after, converted = build(args, model, format)
    samples = draw(args, model, format)
    labels = torch.randint(CLASSES, (len(samples),), device=device)
    if not is_same(before, after, samples[:8]):
        return None
    convolutions_s = depthwise_seconds(before, samples, DTYPES[dtype], args)
    if args.compile:
        torch._dynamo.reset()
        before, after = torch.compile(before), torch.compile(after)  # type: ignore[assignment]
    steps = [make_step(each, samples, labels, DTYPES[dtype]) for each in (before, after)]
    for step in steps:
        seconds(step, 3, device)  # picks algorithms, allocates, compiles
    times = [[seconds(step, args.steps, device) for step in steps] for _ in range(args.turns)]
    before_s, after_s = (median(column) for column in zip(*times, strict=True))
    ratio = median(theirs / ours for theirs, ours in times)
    convert = "+".join(args.convert)
    rates = len(samples) / before_s, len(samples) / after_s
    return Row(model, convert, dtype, format, converted, *rates, ratio, convolutions_s / before_s)


def means(rows: list[Row]) -> dict[str, float]:
    """Return geometric means of the ratios: for each dtype and format, and overall."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(f"{row.dtype} {row.format}", []).append(row.ratio)
    groups["all"] = [row.ratio for row in rows]
    return {name: geometric_mean(ratios) for name, ratios in groups.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    args = parse(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    mode = "torch.compile" if args.compile else "eager"
    print(f"{name}, torch {torch.__version__}, {mode}", flush=True)
    rows, failed = [], False
    for model, dtype, format in product(args.model, args.dtype, args.format):
        if model in sequences.SHAPES and format != args.format[0]:
            continue  # the memory format is that of images
        row = measure(args, model, dtype, format)
        if row is None:
            print(f"{model} {dtype} {format}: WRONG: the converted model's results differ")
            failed = True
            continue
        rows.append(row)
        print(row.line(), flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if rows:
        for group, mean in means(rows).items():
            print(f"geometric mean, {group}: {mean:.2f}x")
        if args.csv:
            with args.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, [item.name for item in fields(Row)])
                writer.writeheader()
                writer.writerows(asdict(row) for row in rows)
    return int(failed or not rows or any(math.isnan(row.ratio) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
