"""Raise PyTorch's own exception where a kernel could not allocate memory.

The stable ABI loses the exception's type, so a kernel raises "cannot allocate N bytes on DEVICE",
and the allocation is repeated by PyTorch: by the eager library wherever the operator is called,
else by the operator's Python function and by autograd.
"""

import re

import torch


def repeat_allocation(error: Exception) -> None:
    """Raise torch.OutOfMemoryError or the CPU allocator's RuntimeError if `error` was one."""
    failed = re.search(r"cannot allocate (\d+) bytes on (\w+(?::\d+)?)", str(error))
    if failed is None:
        return
    try:
        torch.empty(int(failed[1]), dtype=torch.uint8, device=failed[2])
    except RuntimeError as own:
        raise own from None
