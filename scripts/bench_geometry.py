"""Measure depthwise convolution against PyTorch's on random geometries.

    python scripts/bench_geometry.py [--dims 1|2] [--device cuda|cpu] [--count 300] [--least 0.95]

Forward, input gradient and weight gradient are timed in turns with PyTorch's, in one process on the
same tensors. Ratio: time of PyTorch's fastest backend in the same memory format (cuDNN in benchmark
mode and off, or oneDNN on and off) / our time. Rows below 1 are measured three times, and the
median counts; rows above 4 by a single call. Backends whose results differ from ours are left out;
if all of them differ, that is an error. Prints the ten worst rows; exits 1 if one is below --least.
"""

import argparse
import csv
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import this checkout
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch's CPU allocator

import torch
import torch.nn.functional as F
from bench.cases import FORMATS, contexts, lay_out, pass_call, relative_error
from bench.measure import Candidate, CpuTimer, CudaTimer, Timer
from torch import Tensor

import ops

DTYPES = {
    torch.float64: 1e-9,  # tolerance: relative difference of the norm
    torch.float32: 1e-3,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}
ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 25}  # most elements of an input
PASSES = ("forward", "backward-input", "backward-weight")
REPEATS = 3  # measurements of a row where PyTorch is faster
# GPU time alone is measured: host time does not depend on the geometry. Without the eager library,
# autograd in Python took longer than 4 flushes: ratios of 0.05 that are 0.8 to 0.9 with 10.
HIDING_FLUSHES = 10
SLOW = 4  # ratio above which a single call decides

Sides = tuple[int, ...]  # of each dimension


@dataclass(frozen=True)
class Depthwise:
    """A depthwise convolution: shapes, dtype and memory format."""

    n: int
    c: int
    size: Sides
    kernel: Sides
    stride: Sides
    padding: Sides
    dilation: Sides
    dtype: torch.dtype
    format: str

    @property
    def label(self) -> str:
        """Return the table's label."""

        def side(sides: Sides) -> str:
            return "x".join(map(str, dict.fromkeys(sides)))

        size = "x".join(map(str, self.size))
        return (
            f"{self.n}x{self.c}x{size} k{side(self.kernel)} "
            f"s{side(self.stride)} p{side(self.padding)} d{side(self.dilation)} "
            f"{str(self.dtype).removeprefix('torch.')} {self.format}"
        )

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        """Run this project's operator."""
        if len(self.size) == 1:
            (stride,), (padding,), (dilation,) = self.stride, self.padding, self.dilation
            return ops.depthwise_conv1d(x, weight, None, stride, padding, dilation)
        return ops.depthwise_conv2d(x, weight, None, self.stride, self.padding, self.dilation)

    def peer(self, x: Tensor, weight: Tensor) -> Tensor:
        """Run PyTorch's convolution."""
        convolve = F.conv1d if len(self.size) == 1 else F.conv2d
        return convolve(x, weight, None, self.stride, self.padding, self.dilation, groups=self.c)

    def tensors(self, device: str) -> tuple[list[Tensor], Tensor]:
        """Draw input and weight, and the gradient of the output."""
        x = torch.randn(self.n, self.c, *self.size, device=device).to(self.dtype)
        x = lay_out(x, FORMATS[self.format])
        weight = torch.randn(self.c, 1, *self.kernel, device=device).to(self.dtype)
        return [x, weight], torch.randn_like(self.ours(x, weight))


def log_uniform(rng: random.Random, least: int, most: int) -> int:
    """Draw an integer whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def draw_sides(rng: random.Random, dims: int, choose: Callable[[], int]) -> Sides:
    """Draw an integer for each dimension; two are most often the same."""
    first = choose()
    if dims == 1:
        return (first,)
    return first, first if rng.random() < 0.6 else choose()


def draw(seed: int, elements: int, dims: int) -> Iterator[Depthwise]:
    """Yield random geometries with log-uniform sizes, channels and batches."""
    rng = random.Random(seed)
    taps: Sequence[int] = range(1, 12) if dims == 2 else [*range(1, 17), 31, 63, 128]
    least, most = (7, 512) if dims == 2 else (16, 16384)
    while True:
        kernel = draw_sides(rng, dims, lambda: rng.choice(taps))
        stride, dilation = (draw_sides(rng, dims, lambda: rng.choice(range(1, 5))) for _ in "sd")
        padding = tuple(rng.randint(0, k) for k in kernel)
        size = draw_sides(rng, dims, lambda: log_uniform(rng, least, most))
        channels = log_uniform(rng, 1, 1024)
        batch = log_uniform(rng, 1, 64)
        sides = zip(size, kernel, padding, dilation, strict=True)
        fits = all(s + 2 * p > d * (k - 1) for s, k, p, d in sides)
        dtype, memory_format = rng.choice(list(DTYPES)), rng.choice(list(FORMATS))
        if fits and batch * channels * math.prod(size) <= elements:
            yield Depthwise(
                batch, channels, size, kernel, stride, padding, dilation, dtype, memory_format
            )


def difference(ours: object, peer: object) -> float:
    """Return the relative difference of two results of a pass."""
    assert isinstance(ours, dict)
    assert isinstance(peer, dict)
    return max(
        relative_error(a, b.double()) if b.count_nonzero() else float(a.abs().max())
        for a, b in zip(ours.values(), peer.values(), strict=True)
    )


def seconds(call: Callable[[], object], candidate: Candidate, device: str) -> float:
    """Time a single call."""
    with candidate.context():
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def compare(
    geometry: Depthwise, what: str, tensors: list[Tensor], grad: Tensor, timer: Timer, budget: float
) -> tuple[float, float, str]:
    """Return our time in ms, that of PyTorch's fastest backend, and its name."""
    device = grad.device.type

    def candidate(name: str, function: Callable[..., Tensor], **context: object) -> Candidate:
        return Candidate(name, lambda: pass_call(what, function, tensors, grad), **context)  # type: ignore[arg-type]

    candidates = [candidate("ours", geometry.ours)] + [
        candidate(name, geometry.peer, context=context)
        for name, context in contexts("depthwise", device).items()
    ]
    calls, results = {}, {}
    for c in candidates:
        with c.context():
            calls[c.name] = (c.prepare(), c)
            results[c.name] = calls[c.name][0]()
    if device == "cuda":
        torch.cuda.synchronize()
    apart = {name: difference(results["ours"], results[name]) for name in calls if name != "ours"}
    for name in apart:
        if not apart[name] <= DTYPES[geometry.dtype]:
            del calls[name]  # e.g. oneDNN's bfloat16 weight gradient with dilation is NaN
    if len(calls) == 1:
        raise SystemExit(f"error: {geometry.label} {what}: results differ by {apart}")
    del results
    once = {name: seconds(call, c, device) * 1e3 for name, (call, c) in calls.items()}
    fastest = min(once[name] for name in once if name != "ours")
    if fastest > SLOW * once["ours"]:
        times = once
    else:
        calls = {k: v for k, v in calls.items() if k == "ours" or once[k] < 1.5 * fastest}
        times = timer.measure(calls, budget)
    ours = times.pop("ours")
    best = min(times, key=lambda name: times[name])
    return ours, times[best], best


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    text = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=text[0], epilog="\n\n".join(text[2:]))
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    add("--dims", type=int, choices=[1, 2], default=2, help="dimensions (default: 2)")
    add("--count", type=int, default=300, help="geometries (default: 300)")
    add("--seed", type=int, default=0, help="of the geometries (default: 0)")
    add("--only", type=int, metavar="INDEX", nargs="+", help="measure these geometries")
    add("--budget", type=float, default=0.02, metavar="S", help="seconds a call (default: 0.02)")
    add("--least", type=float, metavar="RATIO", help="exit 1 if a ratio is less")
    add("--csv", type=Path, metavar="FILE", help="write every row")
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error("--count must be at least 1")
    if not all(0 <= index < args.count for index in args.only or ()):
        parser.error(f"--only takes indices from 0 to {args.count - 1} (below --count)")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    args = parse(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    timer: Timer = CudaTimer(HIDING_FLUSHES) if device == "cuda" else CpuTimer()
    if device == "cpu":
        # Not at the top: measuring a GPU needs torch alone.
        from app.config.device import keep_freed_memory

        keep_freed_memory()
    torch.manual_seed(args.seed)
    rows = []
    geometries = draw(args.seed, ELEMENTS[device], args.dims)
    for index, geometry in enumerate(itertools.islice(geometries, args.count)):
        if args.only and index not in args.only:
            continue
        tensors, grad = geometry.tensors(device)
        for what in PASSES:
            runs = [compare(geometry, what, tensors, grad, timer, args.budget)]
            while len(runs) < REPEATS and runs[0][1] < runs[0][0]:
                runs.append(compare(geometry, what, tensors, grad, timer, 2 * args.budget))
            ratio = median(peer / ours for ours, peer, _ in runs)
            ours, peer, name = min(runs)
            rows.append((ratio, index, geometry.label, what, ours, peer, name))
    rows.sort()
    if args.csv:
        with args.csv.open("w", newline="") as file:
            header = ("ratio", "index", "geometry", "pass", "ours_ms", "peer_ms", "peer")
            csv.writer(file).writerows([header, *rows])
    print("| ratio | geometry | pass | ours, ms | PyTorch, ms | backend |")
    print("|---|---|---|---|---|---|")
    for ratio, index, label, what, ours, peer, name in rows[:10]:
        print(f"| {ratio:.2f} | {index}: {label} | {what} | {ours:.4f} | {peer:.4f} | {name} |")
    for what in dict.fromkeys(row[3] for row in rows):
        ratios = [row[0] for row in rows if row[3] == what]
        below = sum(r < (args.least or 1) for r in ratios)
        print(
            f"{what}: worst {min(ratios):.2f}, geometric mean {geometric_mean(ratios):.2f}, "
            f"{below} of {len(ratios)} below {args.least or 1}"
        )
    return int(args.least is not None and rows[0][0] < args.least)


if __name__ == "__main__":
    sys.exit(main())
