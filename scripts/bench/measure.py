"""Timers for CPU and CUDA; copy rate and float32 FMA rate of a device."""

import gc
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """An implementation to time.

    Attributes:
        name: column or row in the table.
        prepare: runs what is not timed (for a backward pass, forward); returns the call to time.
        context: global settings of the call, entered outside the timed region.
    """

    name: str
    prepare: Callable[[], Call]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


class Timer(Protocol):
    """Interface of CpuTimer and CudaTimer."""

    def measure(
        self, calls: Mapping[str, tuple[Call, Candidate]], budget_s: float
    ) -> dict[str, float]:
        """Return the median ms of each call; calls are interleaved, `budget_s` is for each."""

    def measure_graph(self, call: Call, candidate: Candidate, call_ms: float) -> float | None:
        """Return the time of a call inside a replayed CUDA graph in ms (None on the CPU)."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class CpuTimer:
    """Time calls on the CPU with warm caches, in blocks of at least 0.2 ms.

    With one thread it measures processor time, which other processes disturb less than wall time.
    """

    BLOCK_S = 2e-4

    def __init__(self) -> None:
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def measure(
        self, calls: Mapping[str, tuple[Call, Candidate]], budget_s: float
    ) -> dict[str, float]:
        """See Timer."""

        def seconds(call: Call, repeats: int) -> float:
            start = self.clock()
            for _ in range(repeats):
                call()
            return (self.clock() - start) / repeats

        times: dict[str, list[float]] = {name: [] for name in calls}
        with no_garbage_collection():
            once = {}
            for name, (call, candidate) in calls.items():
                with candidate.context():
                    once[name] = min(seconds(call, 1) for _ in range(3))
            repeats = {name: max(1, round(self.BLOCK_S / t)) for name, t in once.items()}
            round_s = sum(once[name] * repeats[name] for name in calls)
            for _ in range(min(max(int(budget_s * len(calls) / round_s), 7), 500)):
                for name, (call, candidate) in calls.items():
                    with candidate.context():
                        times[name].append(seconds(call, repeats[name]))
        return {name: median(t) * 1e3 for name, t in times.items()}

    def measure_graph(self, call: Call, candidate: Candidate, call_ms: float) -> float | None:
        """Return None: the CPU has no CUDA graphs."""
        return None


class CudaTimer:
    """Time calls with CUDA events, after a flush of the L2 cache (but in graphs).

    The flush overwrites a large buffer. Launches overlap it: their first 70 µs (H200) are not
    measured. More `flushes` hide more of the host time, until only GPU time is measured.
    """

    FLUSH_BYTES = 256 << 20
    GRAPH_MS = 2.0  # target duration of a replay
    GRAPH_CALLS = 20  # most calls in a graph

    def __init__(self, flushes: int = 1) -> None:
        self.flushes = flushes
        # Capture needs a stream other than the default; backward runs on forward's stream.
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.flush = torch.empty(self.FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def _milliseconds(self, calls: list[tuple[str, Call, Candidate]]) -> list[tuple[str, float]]:
        events = []
        for name, call, candidate in calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with candidate.context():
                for _ in range(self.flushes):
                    self.flush.zero_()
                start.record()
                call()
                end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        return [(name, start.elapsed_time(end)) for name, start, end in events]

    def measure(
        self, calls: Mapping[str, tuple[Call, Candidate]], budget_s: float
    ) -> dict[str, float]:
        """See Timer."""
        turn = [(name, call, candidate) for name, (call, candidate) in calls.items()]
        with no_garbage_collection():
            self._milliseconds(turn)  # compiles kernels, picks cuDNN's algorithms
            round_s = sum(0.1 + ms for _, ms in self._milliseconds(turn)) / 1e3
            rounds = min(max(int(budget_s * len(calls) / round_s), 7), 200)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for name, ms in self._milliseconds(turn * rounds):
                times[name].append(ms)
        return {name: median(t) for name, t in times.items()}

    def measure_graph(self, call: Call, candidate: Candidate, call_ms: float) -> float | None:
        """See Timer; the graph has several calls back to back, with a warm cache."""
        calls = max(1, min(self.GRAPH_CALLS, round(self.GRAPH_MS / call_ms)))
        graph = torch.cuda.CUDAGraph()
        with candidate.context(), torch.cuda.graph(graph, stream=self.stream):
            for _ in range(calls):
                call()
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in times) / calls


@dataclass(frozen=True)
class Device:
    """A device, its measured peak rates and its timer.

    Attributes:
        type: "cpu" or "cuda".
        name: processor, as the tables name it.
        copy_rate: bytes/s of a large `copy_`, read plus written.
        fma_rate: float32 multiply-adds/s of a large matrix product, without TF32.
        timer: for calls on this device.
    """

    type: str
    name: str
    copy_rate: float
    fma_rate: float
    timer: Timer


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def open_device(kind: str) -> Device:
    """Return the device `kind` ("cpu" or "cuda") with its measured copy and FMA rates."""
    cuda = kind == "cuda"
    timer: Timer = CudaTimer() if cuda else CpuTimer()
    nbytes = (2 << 30) if cuda else (256 << 20)
    size = 8192 if cuda else 1536
    source = torch.ones(nbytes // 4, device=kind)
    target = torch.empty_like(source)
    a, b = torch.randn(2, size, size, device=kind)

    def fastest(call: Call) -> float:
        candidate = Candidate("", lambda: call)
        return min(timer.measure({"": (call, candidate)}, 0.3)[""] for _ in range(3)) / 1e3

    fma_rate = size**3 / fastest(lambda: torch.mm(a, b))
    copy_rate = 2 * nbytes / fastest(lambda: target.copy_(source))
    name = torch.cuda.get_device_name() if cuda else _cpu_name()
    return Device(kind, name, copy_rate, fma_rate, timer)
