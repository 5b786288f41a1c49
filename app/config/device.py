"""Choose and describe a device; configure memory and threads of the CPU."""

import ctypes
import os
import platform
import time

import torch

from app.config.environment import read_torchrun
from app.config.errors import UserError
from app.config.schema import counted

PROBE_SECONDS = 0.06  # for each number of threads
MIN_SPEEDUP = 1.3  # of fewer threads, to prefer them


def pick_device(name: str) -> torch.device:
    """Return the device of a setting (`cuda`: of the local rank); raise a UserError if missing."""
    count = torch.cuda.device_count()
    here = ["auto", "cpu", *(f"cuda:{index}" for index in range(count))]
    wanted = ("cuda" if count else "cpu") if name == "auto" else name
    if wanted == "cuda":
        rank = read_torchrun().local_rank
        if (rank or 0) < count:
            return torch.device("cuda") if rank is None else torch.device("cuda", rank)
    if wanted not in here:  # torch wraps large indices: cuda:256 would be cuda:0
        raise UserError(f"device={name}: not on this machine, choose from {', '.join(here)}")
    return torch.device(wanted)


def describe(device: torch.device) -> str:
    """Describe the device: the GPU's name, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {counted(torch.get_num_threads(), 'thread')}"


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the tensors of the next step.

    By default the kernel zeroes large blocks again: a fifth of the time of a step or more.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold, gibibyte = -1, -3, 2**30  # as in malloc.h
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, gibibyte)
        library.mallopt(mmap_threshold, gibibyte)


def choose_threads(device: torch.device, before: int = 0) -> None:
    """Set the number of CPU threads: `before`, that of a run to resume; 0: the fastest now.

    Threads synchronise after each operation: if another process occupies a core, fewer threads are
    faster. The number of threads affects the order of sums and so the last bits of the weights.
    OMP_NUM_THREADS fixes it.
    """
    most = torch.get_num_threads()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and most > 1:
        torch.set_num_threads(min(before, most) if before else fastest_threads(most))


def fastest_threads(most: int) -> int:
    """Return the number of threads up to `most` that is fastest now; prefer more if similar."""
    before, values = torch.get_num_threads(), torch.rand(2**17)
    best, highest = most, 0.0
    for threads in sorted({most, (most + 1) // 2, 1}, reverse=True):
        torch.set_num_threads(threads)
        torch.sigmoid(values)
        count, end = 0, time.perf_counter() + PROBE_SECONDS
        while time.perf_counter() < end:
            torch.sigmoid(values)
            count += 1
        if count > MIN_SPEEDUP * highest:
            best, highest = threads, count
    torch.set_num_threads(before)
    return best
