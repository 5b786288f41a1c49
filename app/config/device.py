import ctypes
import os
import platform

import torch

from app.config.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` stands for on this machine.

    Without a number it is the first GPU; for a process of torchrun, the one of its local rank.

    Raises:
        UserError: There is no such device here.
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
    """The device in words: the GPU's name, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def keep_freed_memory() -> None:
    """Have the C library keep what tensors on the CPU leave behind for those of the next step.

    By default glibc hands large pieces back to the system, which clears them page by page when
    they are asked for again: a fifth of a training step, and more. Nothing happens elsewhere.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold, gibibyte = -1, -3, 2**30  # as in malloc.h
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, gibibyte)
        library.mallopt(mmap_threshold, gibibyte)
