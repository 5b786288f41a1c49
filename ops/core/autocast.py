"""Autocast kernels in Python, used without the eager library."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ops.core.torch_private import OpOverload, below_autocast, transforms_active, version_of

# Cache of cast weights, as in at::autocast::cached_cast. An entry is valid for one version of the
# weight, and only while autograd keeps the result alive.
_casts = WeakTensorKeyDictionary()


def make_kernel(op: OpOverload, device: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return an autocast kernel: cast floating tensors on `device`, except float64, and call `op`.

    Args:
        op: the operator.
        device: device type of the autocast region.
        dtype: the dtype to cast to; None: that of the autocast region.
    """

    def autocast(*args: Any) -> Any:
        target = dtype or torch.get_autocast_dtype(device)
        with below_autocast(device):
            return op(*(_cast(x, device, target) for x in args))

    return autocast


def _cast(x: Any, device: str, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor) or x.device.type != device or not x.is_floating_point():
        return x
    if x.dtype in (torch.float64, dtype):
        return x
    cached = x.is_leaf and x.requires_grad and torch.is_autocast_cache_enabled()
    if not cached or transforms_active():
        return x.to(dtype)
    key = (version_of(x), dtype, torch.is_grad_enabled())
    known, reference = _casts.get(x, (None, None))
    result = reference() if known == key else None
    if result is None:
        result = x.to(dtype)
        _casts[x] = key, TensorWeakRef(result)
    return result
