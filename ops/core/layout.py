"""Memory format of fake tensors, by the rules of layout.h."""

from typing import Any

import torch
from torch import Tensor

from ops.core.torch_private import suggest_memory_format

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Return whether operators on `x` return channels-last outputs (4-D or 5-D)."""
    return suggest_memory_format(x) != torch.contiguous_format


def empty(like: Tensor, shape: Any, channels_last: bool) -> Tensor:
    """Return an empty tensor of `shape` with dtype and device of `like`."""
    return torch.empty(
        shape,
        dtype=like.dtype,
        device=like.device,
        memory_format=_CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format,
    )


def gradient_of(parameter: Tensor) -> Tensor:
    """Return an empty gradient: the strides of a dense `parameter`, otherwise contiguous."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        return parameter.new_empty_strided(parameter.shape, parameter.stride())
    return parameter.new_empty(parameter.shape)


def resized(x: Tensor, height: Any, width: Any) -> Tensor:
    """Return an empty image [N, C, height, width] with dtype, device and memory format of `x`."""
    return empty(x, (*x.shape[:2], height, width), is_channels_last(x))
