"""Convert failed allocations in kernels to PyTorch's out-of-memory errors.

The stable ABI loses the exception's type: a kernel raises "cannot allocate N bytes on DEVICE".
PyTorch then repeats the allocation, which raises the right type. The eager library does this in
every call; without it, the operator's Python function and autograd do.
"""

import re

import torch


def repeat_allocation(error: Exception) -> None:
    """Raise torch.OutOfMemoryError (CPU: RuntimeError) if `error` is a failed allocation."""
    failed = re.search(r"cannot allocate (\d+) bytes on (\w+(?::\d+)?)", str(error))
    if failed is None:
        return
    try:
        torch.empty(int(failed[1]), dtype=torch.uint8, device=failed[2])
    except RuntimeError as own:
        raise own from None
