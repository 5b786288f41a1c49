import ctypes
import os
import platform

import torch

from app.config.errors import UserError


def pick_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`.

    Without a number: the first GPU; under torchrun, the GPU of the local rank.

    Raises:
        UserError: There is no such device.
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
