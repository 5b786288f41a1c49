"""Measure exported networks in ONNX Runtime against stock layers and PyTorch.

    python scripts/bench_onnx.py [--act ncrelu] [--conv depthwise] [--threads 1 2] [--csv FILE]

For each activation and convolution: our network exported by both exporters in both layouts, and
quantized to int8; the same network with torch.nn layers and the same weights, exported; our network
in PyTorch, eager and compiled. They take turns in one process, a block of calls at a time in random
order; the fastest block counts. The outputs are compared first (int8: only the predicted classes).
"""

import argparse
import csv
import logging
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import this checkout

import numpy as np
import onnxruntime
import torch
from bench.stock import with_stock_layers
from torch import Tensor, nn

from app.config.schema import LeNetConfig
from app.export.quantize import quantize
from app.models import build_model
from ops.export import export_onnx

BATCHES = (1, 32, 1024)
BLOCK_S = 0.005  # seconds of a block of calls, at least one call
LEAST_TURNS = 9
STOCK, EAGER = "stock layers", "torch eager"
OURS = "symbolic, function"
TOLERANCE = 1e-4  # largest difference of the logits


@dataclass
class Row:
    """Seconds a call in each turn, by candidate, for one network, thread count and batch size."""

    network: str
    threads: int
    batch: int
    times: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str) -> float:
        """Return seconds a call in the fastest turn."""
        return min(self.times[name])

    def ratio(self, name: str, base: str) -> float:
        """Return the time of `base` / the time of `name`."""
        return self.time(base) / self.time(name)


def models(network: nn.Module, calibration: Tensor) -> dict[str, bytes]:
    """Return the exported files by candidate."""
    names = {"input_names": ["image"], "output_names": ["logits"]}
    dynamic = {"image": {0: "batch"}, "logits": {0: "batch"}}
    example = (torch.zeros(2, 1, 28, 28),)
    exported = {
        f"{exporter}, {layout}": export_onnx(
            network, example, exporter=exporter, layout=layout, dynamic_axes=dynamic, **names
        )
        for exporter, layout in product(("symbolic", "dynamo"), ("function", "standard"))
    }
    exported["int8"] = quantize(exported["symbolic, standard"], calibration)
    stock = with_stock_layers(network)
    exported[STOCK] = export_onnx(stock, example, dynamic_axes=dynamic, **names)
    return {name: model.SerializeToString() for name, model in exported.items()}


def make_session(model: bytes, threads: int) -> Callable[[Tensor], Any]:
    """Return a function that runs an ONNX file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"image": x.numpy()})[0]


def measure(calls: dict[str, Callable[[], Any]], budget_s: float) -> dict[str, list[float]]:
    """Return seconds a call in each turn, for as many turns as the budget allows."""

    def seconds(call: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    counts = {}
    for name, call in calls.items():
        seconds(call, 2)
        counts[name] = max(1, round(BLOCK_S / seconds(call, 2)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, order, shuffle = time.perf_counter() + budget_s, list(calls), random.Random(0).shuffle
    while time.perf_counter() < end or len(times[order[0]]) < LEAST_TURNS:
        shuffle(order)  # torch's calls evict the next candidate's data from the caches
        for name in order:
            calls[name]()
            times[name].append(seconds(calls[name], counts[name]))
    return times


def check(results: dict[str, Any], expected: Tensor, name: str) -> None:
    """Raise SystemExit if a candidate's results differ from `expected`."""
    for candidate, result in results.items():
        if candidate == "int8":
            right = (result.argmax(1) == expected.argmax(1).numpy()).mean() > 0.9
        else:
            right = np.abs(np.asarray(result) - expected.numpy()).max() <= TOLERANCE
        if not right:
            raise SystemExit(f"{name}: the results of {candidate} differ")


def candidate_rows(cfg: LeNetConfig, args: argparse.Namespace) -> list[Row]:
    """Measure all candidates of one network."""
    torch.manual_seed(0)
    network = build_model(cfg, 10).eval()
    nn.init.normal_(network.classifier[-1].weight)  # distinct logits
    name = f"{cfg.act}, {cfg.conv}"
    calibration = torch.randn(1000, 1, 28, 28)
    eager = build_model(cfg, 10).eval()
    eager.load_state_dict(network.state_dict())
    files = models(network, calibration)
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        sessions = {label: make_session(model, threads) for label, model in files.items()}
        torch._dynamo.reset()
        runners: dict[str, Callable[[Tensor], Any]] = {
            **sessions,
            EAGER: eager,
            "torch.compile": torch.compile(eager, dynamic=False),
        }
        with torch.inference_mode():
            check({k: run(calibration) for k, run in runners.items()}, eager(calibration), name)
            for batch in args.batch:
                x = torch.randn(batch, 1, 28, 28)
                calls = {label: partial(run, x) for label, run in runners.items()}
                row = Row(name, threads, batch, measure(calls, args.seconds))
                print(line(row), flush=True)
                rows.append(row)
    return rows


def line(row: Row) -> str:
    """Return the row as text."""
    cells = [f"{name} {row.time(name) * 1e6:.0f} µs" for name in row.times]
    text = f"{row.network:18} {row.threads} threads, batch {row.batch:4}: {'; '.join(cells)}"
    return f"{text}; {row.ratio(OURS, STOCK):.3f}x stock, {row.ratio(OURS, EAGER):.2f}x eager"


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write a line for each row and candidate."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["network", "threads", "batch", "candidate", "us", "over_stock", "over_eager"]
        )
        for row in rows:
            for name in row.times:
                ratios = (f"{row.ratio(name, base):.4f}" for base in (STOCK, EAGER))
                us = f"{row.time(name) * 1e6:.2f}"
                writer.writerow([row.network, row.threads, row.batch, name, us, *ratios])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    text = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=text[0], epilog=text[2])
    acts, convs = ["relu", "gelu", "ncrelu"], ["standard", "depthwise"]
    add = parser.add_argument
    add("--act", nargs="+", choices=acts, default=acts, help="default: all")
    add("--conv", nargs="+", choices=convs, default=convs, help="default: both")
    add("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="default: 1 and 2")
    add("--batch", nargs="+", type=int, default=BATCHES, metavar="N", help="default: 1 32 1024")
    add("--seconds", type=float, default=8, metavar="S", help="for a row (default: 8)")
    add("--csv", type=Path, metavar="FILE", help="write the numbers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    args = parse(argv)
    logging.disable(logging.WARNING)  # from the exporters
    warnings.simplefilter("ignore")
    versions = f"ONNX Runtime {onnxruntime.__version__}, torch {torch.__version__}"
    print(f"{os.cpu_count()} CPUs ({platform.machine()}), {versions}", flush=True)
    rows = []
    for act, conv in product(args.act, args.conv):
        rows += candidate_rows(LeNetConfig(act, conv), args)
    if args.csv:
        write_csv(args.csv, rows)
    slowest = min(row.ratio(OURS, STOCK) for row in rows)
    print(f"against stock layers, at least {slowest:.3f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
