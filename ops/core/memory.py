"""Convert failed allocations in kernels to PyTorch's out-of-memory errors.

The stable ABI loses the exception's type: a kernel raises "cannot allocate N bytes on DEVICE". To
raise the right type, PyTorch repeats the allocation. The eager library does this in every call;
without it, `convert_out_of_memory` does.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def convert_out_of_memory(function: F, name: str | None = None) -> F:
    """Wrap `function`: a failed allocation raises torch.OutOfMemoryError (CPU: RuntimeError).

    The message ends with the operator's `name`, by default that of the function.
    """
    context = f"in {name or function.__name__.lstrip('_')}"

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except RuntimeError as error:
            if str(error) == "std::bad_alloc":  # of a workspace
                raise RuntimeError(f"{error} ({context})") from None
            if failed := re.search(r"cannot allocate (\d+) bytes on (\w+(?::\d+)?)", str(error)):
                try:
                    torch.empty(int(failed[1]), dtype=torch.uint8, device=failed[2])
                except RuntimeError as own:
                    raise type(own)(f"{own} ({context})") from None
            raise

    return cast(F, call)
