"""Measure the operators against eager PyTorch and torch.compile, in one process on the same inputs.

    python scripts/bench_ops.py [--device cuda|cpu] [--op gelu] [--csv FILE] [--plot FILE]

A row is one pass over one shape, dtype and memory format: our median time; the floor, which is the
roofline bound max(bytes / copy rate, multiply-adds / float32 rate) at measured rates; floor / our
time; the fastest peer in the same memory format; its time / our time. On CUDA, small shapes have a
second column: the same inside a replayed CUDA graph, without launch overhead and with a warm cache.

On the CPU caches are warm. Freed memory is kept and comes in huge pages (THP_MEM_ALLOC_ENABLE=1),
to keep page faults out of the times of all implementations.

Peers: the composition of PyTorch operators (for convolution with cuDNN in benchmark mode or oneDNN,
and without), torch.compile of it, compiled anew for every row, and for depthwise1d of up to 4 taps
the package causal-conv1d, where it is installed. Forward runs without gradients.
Backward runs through autograd over a retained graph. Each of our results is first compared with
float64; a wrong one is not timed, and the exit code is 1.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import this checkout
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch's CPU allocator

import torch
import torch._functorch.config
from bench import recurrent, sequences
from bench.cases import (
    COMPILED,
    DEPTHWISE,
    DTYPES,
    FORMATS,
    OPS,
    PASSES,
    Case,
    cases,
    contexts,
    find_error,
    lay_out,
    pass_call,
    reference_results,
    relative_error,
)
from bench.measure import Candidate, Device, open_device
from bench.page import OURS
from bench.report import HEADER, Row, plot, read_csv, summary, write_csv
from torch import Tensor

GRAPH_BYTES = 32 << 20  # inputs up to this size are also timed in CUDA graphs
PEER_ERROR = 0.03  # peers with a larger relative error are left out


class WrongResultError(Exception):
    """Our result differs from the float64 reference."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    text = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=text[0], epilog="\n\n".join(text[2:]))
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    add("--op", choices=OPS, nargs="+", help="default: all")
    add("--dtype", choices=list(DTYPES), nargs="+", help="default: all (quick: two)")
    add("--format", choices=list(FORMATS), nargs="+", help="default: both")
    add("--pass", choices=list(PASSES), nargs="+", dest="passes", help="default: all")
    add("--shape", metavar="TEXT", help="only shapes whose label contains TEXT, e.g. 'k7'")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add(
        "--quick",
        action="store_true",
        help="short measurements, float32 and bfloat16, torch.compile only where it makes kernels "
        "of its own (elementwise)",
    )
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add("--csv", type=Path, metavar="FILE", help="write every implementation's numbers")
    add("--plot", type=Path, metavar="FILE", help="draw time over floor (first dtype)")
    add("--read", type=Path, metavar="CSV", help="report on an earlier --csv, measure nothing")
    return parser.parse_args(argv)


def candidates(
    case: Case, what: str, inputs: list[Tensor], grad: Tensor, compiled: bool
) -> Iterator[Candidate]:
    """Yield our operator, then the peers."""

    def prepare(make: Callable[[], Callable[..., Tensor]]) -> Callable[[], Callable[[], object]]:
        return lambda: pass_call(what, make(), inputs, grad)

    def compile_composition() -> Callable[..., Tensor]:
        torch.compiler.reset()
        return torch.compile(case.composition(), fullgraph=True, dynamic=False)

    yield Candidate(OURS, prepare(case.function))
    for name, context in contexts(case.op, grad.device.type).items():
        yield Candidate(name, prepare(case.composition), context)
    if compiled:
        yield Candidate(COMPILED, prepare(compile_composition))
    if case.op == "depthwise1d" and case.kernel in sequences.CAUSAL_TAPS:
        causal = sequences.causal_conv1d()
        if causal is not None and grad.is_cuda:
            yield Candidate(sequences.CAUSAL, prepare(lambda: causal))
    if case.op in recurrent.NAMES:
        function, tensors = recurrent.lstm(case.op, inputs)
        yield Candidate(recurrent.LSTM, lambda: pass_call(what, function, tensors, grad))


def measure(
    device: Device,
    case: Case,
    row: Row,
    inputs: list[Tensor],
    grad: Tensor,
    exact: dict[str, Tensor],
    compiled: bool,
    budget_s: float,
) -> None:
    """Write the times of all implementations to `row`; raise WrongResultError if ours is wrong."""
    calls = {}
    for candidate in candidates(case, row.what, inputs, grad, compiled):
        name = candidate.name
        try:
            with candidate.context():
                call = candidate.prepare()
                results = call()
            assert isinstance(results, dict)
        except Exception as error:
            if name == OURS:
                raise
            print(f"note: {name} fails on {row.op} {row.shape} {row.what}: {error!r:.200}")
            continue
        if name == OURS:
            if problem := find_error(case, results, exact, grad):
                raise WrongResultError(
                    f"{row.op} {row.shape} {row.dtype} {row.format} {row.what}: {problem}"
                )
        elif name != recurrent.LSTM and not all(
            relative_error(x, exact[key]) < PEER_ERROR for key, x in results.items()
        ):
            print(f"note: {name} is wrong on {row.op} {row.shape} {row.dtype} {row.what}; left out")
            continue
        calls[name] = call, candidate
        del results
    row.ms = device.timer.measure(calls, budget_s)
    if device.type == "cuda" and inputs[0].nbytes <= GRAPH_BYTES:
        for name, (call, candidate) in calls.items():
            try:
                ms = device.timer.measure_graph(call, candidate, row.ms[name])
            except RuntimeError as error:
                print(f"note: no CUDA graph of {name} on {row.shape} {row.what}: {error!r:.200}")
                continue
            if ms is not None:
                row.graph_ms[name] = ms


def run(device: Device, args: argparse.Namespace, wrong: list[Row]) -> Iterator[Row]:
    """Measure and yield the selected rows; append rows with wrong results to `wrong`."""
    budget_s = {"cpu": 0.3, "cuda": 0.1}[device.type] / (4 if args.quick else 1)
    dtypes = args.dtype or (["float32", "bfloat16"] if args.quick else list(DTYPES))
    for case in cases(device.type):
        if (args.op and case.op not in args.op) or (args.shape and args.shape not in case.label):
            continue
        compiled = not args.no_compile and not (args.quick and case.op in DEPTHWISE)
        for dtype in dtypes:
            inputs = case.inputs(device.type, DTYPES[dtype])
            shape = case.composition()(*(x.to("meta") for x in inputs)).shape
            grad = torch.randn(shape, device=device.type).to(DTYPES[dtype])
            exact = reference_results(case, inputs, grad)
            for layout in case.formats:
                if args.format and layout not in args.format:
                    continue
                if len(case.formats) > 1:
                    case.lay_out(inputs, FORMATS[layout])
                    grad = lay_out(grad, FORMATS[layout])
                for what in case.passes:
                    if args.passes and what not in args.passes:
                        continue
                    floor = case.floor_ms(
                        what, inputs[0].itemsize, device.copy_rate, device.fma_rate
                    )
                    row = Row(case.op, case.label, dtype, layout, what, floor)
                    try:
                        measure(device, case, row, inputs, grad, exact, compiled, budget_s)
                    except WrongResultError as error:
                        print(f"error: {error}", flush=True)
                        wrong.append(row)
                    else:
                        yield row


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    args = parse(argv)
    torch._functorch.config.donated_buffer = False  # incompatible with retain_graph
    torch.backends.cudnn.benchmark = True  # also under torch.compile
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        # Not at the top: measuring a GPU needs torch alone.
        from app.config.device import keep_freed_memory

        keep_freed_memory()
    warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    wrong: list[Row] = []
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.read:
        rows, name, version = read_csv(args.read)
    else:
        device = open_device(kind)
        name, version = device.name, torch.__version__
        print(
            f"{name}, torch {version}: copy {device.copy_rate / 1e9:.1f} GB/s, "
            f"{device.fma_rate / 1e9:.1f} G multiply-adds/s in float32\n{HEADER}"
        )
        rows = []
        for row in run(device, args, wrong):
            print(row.line(), flush=True)
            rows.append(row)
    if not rows and not wrong:
        print("error: no shape fits the arguments", file=sys.stderr)
        return 2
    if rows:
        print(summary(rows))
    if args.csv:
        write_csv(args.csv, rows, name, version)
    if args.plot and rows:
        plot(args.plot, rows, f"{name}, torch {version}")
    if wrong:
        print(f"error: {len(wrong)} results are wrong and were not timed", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
