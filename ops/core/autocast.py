"""Autocast kernels in Python, used without the eager library. Casts of weights are not cached."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops.core.torch_private import OpOverload, below_autocast


def make_kernel(op: OpOverload, device: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return an autocast kernel: cast floating tensors on `device`, except float64, and call `op`.

    Args:
        op: the operator.
        device: device type of the autocast region.
        dtype: the dtype to cast to; None: that of the autocast region.
    """

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device.type != device or not x.is_floating_point():
            return x
        return x if x.dtype == torch.float64 else x.to(dtype or torch.get_autocast_dtype(device))

    def autocast(*args: Any) -> Any:
        with below_autocast(device):
            return op(*map(cast, args))

    return autocast
