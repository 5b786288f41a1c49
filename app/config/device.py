"""Devices: choose and describe one; memory and threads of the CPU."""

import ctypes
import math
import os
import platform
import time

import torch

from app.config.errors import UserError

PROBE = 0.06  # seconds of a probe for each number of threads
FASTER = 1.3  # how much faster fewer threads must be
SLOWER = 1.5  # how much slower than the fastest a window of steps must be for a probe
AGAIN = 5.0  # seconds between probes while threads are idle


def pick_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`, or raise a UserError without it.

    Without a number: the first GPU; under torchrun, the GPU of the local rank.
    """
    count = torch.cuda.device_count()
    device = torch.device(("cuda" if count else "cpu") if name == "auto" else name)
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda" and (device.index or 0) >= count:
        here = ", ".join(["auto", "cpu", *(f"cuda:{index}" for index in range(count))])
        raise UserError(f"device={name}: not on this machine, choose from {here}")
    return device


def describe(device: torch.device) -> str:
    """Describe the device: the GPU's name, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def keep_freed_memory() -> None:
    """Keep freed memory in the C library, for the tensors of the next step (glibc only).

    By default glibc returns large pieces to the system, which clears them page by page when they
    are allocated again: a fifth of a training step, and more.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold, gibibyte = -1, -3, 2**30  # as in malloc.h
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, gibibyte)
        library.mallopt(mmap_threshold, gibibyte)


class CpuThreads:
    """The number of CPU threads, adapted to other processes on the machine.

    Threads wait for one another after each operation; where another process holds a core, fewer are
    faster. The number changes the order of sums and so the last bits of a training. A user's
    OMP_NUM_THREADS is kept. A resumed training begins with as many as `before`; 0: probe.
    """

    def __init__(self, device: torch.device, before: int = 0) -> None:
        self.most = torch.get_num_threads()
        free = "OMP_NUM_THREADS" not in os.environ and self.most > 1
        self.adapts = device.type == "cpu" and free
        self.fastest = math.inf
        if self.adapts and before:
            torch.set_num_threads(min(before, self.most))
        elif self.adapts:
            torch.set_num_threads(fastest_threads(self.most))
        self.begin()
        self.probed = self.last

    def begin(self) -> None:
        """Begin a window of steps."""
        self.last = time.perf_counter()

    def adapt(self) -> None:
        """End a window of steps, and probe if it was slow or if threads are idle."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        if not self.adapts:
            return
        if torch.get_num_threads() == self.most:
            due = seconds > SLOWER * self.fastest
        else:
            due = now - self.probed > AGAIN
        self.fastest = min(self.fastest, seconds)  # with any number of threads
        if due:
            torch.set_num_threads(fastest_threads(self.most))
            self.begin()
            self.probed = self.last


def fastest_threads(most: int) -> int:
    """Probe which number of threads up to `most` is fastest now; of similar ones, the largest."""
    before, values = torch.get_num_threads(), torch.rand(2**17)
    best, highest = most, 0.0
    for threads in sorted({most, (most + 1) // 2, 1}, reverse=True):
        torch.set_num_threads(threads)
        torch.sigmoid(values)
        count, end = 0, time.perf_counter() + PROBE
        while time.perf_counter() < end:
            torch.sigmoid(values)
            count += 1
        if count > FASTER * highest:
            best, highest = threads, count
    torch.set_num_threads(before)
    return best
