"""Convert failed allocations in kernels to PyTorch's out-of-memory errors.

The stable ABI loses the exception's type: a kernel raises "cannot allocate N bytes on DEVICE".
PyTorch then repeats the allocation, which raises the right type. The eager library does this in
every call; without it, `with_torch_errors` does.
"""

import re
from collections.abc import Callable
from typing import Any

import torch


def with_torch_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`: a failed allocation raises torch.OutOfMemoryError (CPU: RuntimeError)."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except RuntimeError as error:
            _repeat_allocation(error)
            raise

    return call


def _repeat_allocation(error: RuntimeError) -> None:
    failed = re.search(r"cannot allocate (\d+) bytes on (\w+(?::\d+)?)", str(error))
    if failed is None:
        return
    try:
        torch.empty(int(failed[1]), dtype=torch.uint8, device=failed[2])
    except RuntimeError as own:
        raise own from None
