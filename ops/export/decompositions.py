"""Decompositions of the operators into ATen, for backends that know only ATen operators."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.core.torch_private import OpOverload
from ops.max_pool2d import index_type

Sizes = Sequence[int]


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return the table of forward operators, for ``ExportedProgram.run_decompositions``.

    For backends such as ExecuTorch and Core ML. Backward operators are not included, nor is
    :func:`batch_norm_act2d`, which torch.export records as PyTorch's operators::

        table = torch.export.default_decompositions()
        table.update(decompositions())
        program = torch.export.export(net, (x,)).run_decompositions(table)
    """
    return {getattr(torch.ops.lenet_ops, f.__name__[1:]).default: f for f in _FUNCTIONS}


def _exp(input: Tensor) -> Tensor:
    return torch.exp(input)


def _gelu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(1.702 * input)


def _ncrelu(input: Tensor, dim: int) -> Tensor:
    return torch.cat((input.clamp(min=0), input.clamp(max=0)), dim)


def _global_avg_pool2d(input: Tensor) -> Tensor:
    return input.mean((2, 3), keepdim=True)


def _max_pool2d(
    input: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return maxima and, as the operator, the tap of each in its window."""
    geometry = (kernel, stride, padding, dilation)
    output, pixels = torch.ops.aten.max_pool2d_with_indices(input, *geometry, ceil_mode)
    width, taps = input.shape[3], []
    for axis, index in ((0, pixels // width), (1, pixels % width)):
        count = output.shape[2 + axis]
        starts = torch.arange(count, device=input.device) * stride[axis] - padding[axis]
        starts = starts[:, None] if axis == 0 else starts
        taps.append((index - starts) // dilation[axis])
    return output, (taps[0] * kernel[1] + taps[1]).to(index_type(kernel))


def _depthwise_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: Sizes,
    dilation: int,
    silu: bool,
) -> Tensor:
    padded = F.pad(input, (*padding,))
    y = F.conv1d(padded, weight, bias, stride, 0, dilation, groups=input.shape[1])
    return F.silu(y) if silu else y


def _depthwise_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Sizes
) -> Tensor:
    stride, padding, dilation = ((*sizes,) for sizes in geometry)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups=input.shape[1])


def _involution2d(input: Tensor, weight: Tensor, *geometry: Sizes) -> Tensor:
    stride, padding, dilation = ((*sizes,) for sizes in geometry)
    n, c, *_ = input.shape
    groups, kernel, size = weight.shape[1], weight.shape[2:4], weight.shape[4:]
    columns = F.unfold(input, (*kernel,), dilation, padding, stride)
    columns = columns.view(n, groups, c // groups, prod(kernel), *size)
    return (columns * weight.flatten(2, 3).unsqueeze(2)).sum(3).view(n, c, *size)


def _lltm(
    sequence: Tensor, weights: Tensor, bias: Tensor | None, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, saved = [], []
    for x in sequence.unbind():
        products = F.linear(torch.cat((h, x), 1), weights)
        i, o, z = (products if bias is None else products + bias).chunk(3, 1)
        c = c + F.elu(z) * i.sigmoid()
        h = c.tanh() * o.sigmoid()
        steps.append(h)
        saved.append(torch.cat((products, c), 1))
    return torch.stack(steps), h, c, torch.stack(saved).to(_sum_dtype(sequence))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_FUNCTIONS = (
    *(_exp, _gelu, _ncrelu, _global_avg_pool2d, _max_pool2d),
    *(_depthwise_conv1d, _depthwise_conv2d, _involution2d, _lltm),
)
