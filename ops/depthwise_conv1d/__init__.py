"""Depthwise convolution in one dimension: one filter per channel, and SiLU."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from ops.core import check, layout, windows
from ops.core.calls import public
from ops.core.composition import composed
from ops.core.registration import REGION, register
from ops.core.rules import folded
from ops.core.tracing import constant, record_call

_NAME = "depthwise_conv1d"
_conv = torch.ops.lenet_ops.depthwise_conv1d.default
_conv_backward = torch.ops.lenet_ops.depthwise_conv1d_backward.default

Padding = int | tuple[int, int] | str
_PADDINGS = 'an int, a pair of ints, "valid", "same" or "causal"'


def depthwise_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: Padding = 0,
    dilation: int = 1,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel with its own filter, as ``F.conv1d(..., groups=C)``, then apply SiLU.

    out[n, c, t] = f(bias[c] + Σ weight[c, 0, k] · x[n, c, t s − p + k d]) with x zero outside the
    input, p zeros on the left, and f the activation; To = ⌊(T + zeros − d (K − 1) − 1) / s⌋ + 1.
    Padding adds nothing to output and input gradient, even for infinite inputs. With non-finite
    weights, both may be NaN (0 · ∞). With a non-finite input or output gradient, the weight
    gradient of the same channel may be NaN. With SiLU, autograd saves the input; backward
    recomputes the convolution.

    Args:
        input: [N, C, T] or [C, T], any strides; float64, float32, bfloat16 or float16. Not copied
            if dense along T or C, such as a slice of a projection's channels.
        weight: [C, 1, K], dtype and device of `input`.
        bias: [C] or None.
        stride: step of the filter; at least 1.
        padding: zeros on both sides; (left, right); "valid": none; "causal": (K − 1) d on the left;
            or "same": (K − 1) d on both sides together, for stride 1.
        dilation: spacing between filter taps; at least 1.
        activation: None (or "identity") or "silu".

    Returns:
        [N, C, To] (or [C, To]) in the dtype of `input`; channels-last ([N, To, C] in memory) if
        `input` is dense along C, otherwise contiguous.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        ValueError: an unknown activation.
        RuntimeError: mismatched shapes, dtypes or devices, values out of range.
    """
    if isinstance(input, Proxy):
        args = (weight, bias, stride, padding, dilation, activation)
        return record_call(depthwise_conv1d, input, *args)
    stride, dilation = _single(stride), _single(dilation)
    if isinstance(padding, str):
        padding = _zeros(padding, weight, stride, dilation)
    return _call(input, weight, bias, stride, padding, dilation, _is_silu(_NAME, activation))


_call = public(depthwise_conv1d, _conv, rank=3)


def _single(value: Any) -> Any:
    """Unpack a list or tuple of one element, which PyTorch takes for an int."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _zeros(padding: str, weight: Tensor, stride: int, dilation: int) -> tuple[int, int]:
    """Return the zeros on the left and right for "valid", "same" or "causal"."""
    check.integer(_NAME, "stride", stride)
    check.integer(_NAME, "dilation", dilation)
    # Of an invalid weight: 1; the operator raises.
    taps = constant(weight.shape[-1]) if isinstance(weight, Tensor) and weight.dim() else 1
    total = max(0, (taps - 1) * dilation)  # the operator raises for dilation < 1 or no taps
    if padding == "causal":
        return total, 0
    if padding == "valid":
        return 0, 0
    if padding != "same":
        raise RuntimeError(f"{_NAME}: padding must be {_PADDINGS}, got {padding!r}")
    if stride != 1:
        raise RuntimeError(f'{_NAME}: padding="same" needs stride 1, got {stride}')
    return total // 2, total - total // 2


def _is_silu(name: str, activation: str | None) -> bool:
    return check.activation(name, activation, ("identity", "silu")) == "silu"


class DepthwiseConv1d(nn.Conv1d):
    """Apply :func:`depthwise_conv1d`, with parameters and initialisation of ``nn.Conv1d``.

    State dicts interchange with ``nn.Conv1d(channels, channels, kernel_size, groups=channels)``.

    Args:
        channels: number of input and output channels, C.
        kernel_size: number of taps, K.
        stride: step of the filter.
        padding: zeros on both sides; (left, right); "valid", "same" or "causal".
        dilation: spacing between filter taps.
        bias: whether to add a learned bias [C].
        activation: None (or "identity") or "silu".
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: Padding = 0,
        dilation: int = 1,
        bias: bool = True,
        activation: str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        sizes = [_single(value) for value in (kernel_size, stride, dilation)]
        named = dict(zip(("kernel_size", "stride", "dilation"), sizes, strict=True))
        check.positive(name, **named, channels=channels)
        check.boolean(name, "bias", bias)
        _is_silu(name, activation)
        sides = padding
        if not isinstance(padding, str):
            (sides,) = windows.pairs(name, padding=padding)
        super().__init__(
            channels,
            channels,
            sizes[0],
            sizes[1],
            "same" if padding == "same" else 0,
            sizes[2],
            groups=channels,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        if isinstance(sides, str) and sides not in ("valid", "same", "causal"):
            raise ValueError(f"{name}: padding must be {_PADDINGS}, got {padding!r}")
        self.padding: Any = sides
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of `input` [N, C, T] or [C, T]."""
        geometry: Any = (self.stride[0], self.padding, self.dilation[0], self.activation)
        return depthwise_conv1d(input, self.weight, self.bias, *geometry)

    def extra_repr(self) -> str:
        """Show the arguments."""
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return super().extra_repr() + activation


def _output(
    op: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: Sequence[int],
    dilation: int,
) -> Tensor:
    """Check the arguments of a fake; return an empty output."""
    check.argument(op, "input", input.dim() == 3)
    check.argument(op, "weight", weight.dim() == 3 and weight.shape[2] > 0)
    check.same(op, "weight", weight, (input.shape[1], 1, weight.shape[2]), input.dtype)
    if bias is not None:
        check.same(op, "bias", bias, input.shape[1:2], input.dtype)
    for name, values in (
        ("stride", (stride, stride)),
        ("padding", padding),
        ("dilation", (dilation, dilation)),
    ):
        windows.check_pair(op, name, values)
    room = input.shape[2] + padding[0] + padding[1] - dilation * (weight.shape[2] - 1) - 1
    check.argument(op, "kernel: it must fit into the padded input", room >= 0)
    return _resized(input, room // stride + 1)


def _resized(x: Tensor, length: int) -> Tensor:
    """Return an empty tensor [N, C, length] in the layout of results for an input `x`."""
    n, c, _ = x.shape
    if c > 1 and x.stride(1) == 1 and x.stride(2) >= c:  # is_channels_last in op.h
        return x.new_empty_strided((n, c, length), (c * length, 1, c))
    return x.new_empty((n, c, length))


def _fake(input: Tensor, *args: Any) -> Tensor:
    return _output(_NAME, input, *args[:-1])


def _fake_backward(grad_output: Tensor, input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    op = f"{_NAME}_backward"
    weight, *_, mask = args
    output = _output(op, input, *args[:-2])
    check.same(op, "grad_output", grad_output, output.shape, input.dtype)
    grads = (
        _resized(input, input.shape[2]),
        layout.gradient_of(weight),
        weight.new_empty(input.shape[1:2]),
    )
    return windows.select(op, mask, *grads)


def _compose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: Sequence[int],
    dilation: int,
    silu: bool,
) -> Tensor:
    """Compute the output by the convolution of images of one row, which has all derivatives.

    PyTorch's second derivatives of a grouped convolution loop over the groups.
    """
    accumulator = torch.float64 if input.dtype == torch.float64 else torch.float32
    x, weight = F.pad(input, list(padding)).to(accumulator), weight.to(accumulator)
    bias = None if bias is None else bias.to(accumulator)
    geometry = ((1, stride), (0, 0), (1, dilation))
    conv2d = torch.ops.lenet_ops.depthwise_conv2d
    y = conv2d(x.unsqueeze(2), weight.unsqueeze(2), bias, *geometry).squeeze(2)
    return (y * y.sigmoid() if silu else y).to(input.dtype)


def _decompose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: Sequence[int],
    dilation: int,
    silu: bool,
) -> Tensor:
    padded = F.pad(input, (*padding,))
    y = F.conv1d(padded, weight, bias, stride, 0, dilation, groups=input.shape[1])
    return F.silu(y) if silu else y


def _flops(_: Any, weight: Sequence[int], *rest: Any, out_shape: Any) -> int:
    """Count a multiplication and an addition for each tap of each output."""
    return 2 * prod(out_shape) * weight[2]


def _flops_backward(grad_output: Any, _: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    silu, mask = rest[-2:]  # a convolution per gradient, and one more to recompute SiLU's input
    return (silu + sum(mask[:2])) * _flops(_, weight, out_shape=grad_output)


_derivatives, _second_derivatives = composed(_compose, inputs=3, outputs=1, constants=4)

# Channels are independent, so vmap folds the mapped dimension into them.
register(
    _conv,
    fake=_fake,
    backward=_conv_backward,
    **_derivatives,
    vmap=folded(_conv, (1, 0, 0), (1,)),
    sharding=[((0,), (0, None, None)), ((1,), (1, 0, 0))],
    autocast=REGION,
    flops=_flops,
    decomposition=_decompose,
)
register(
    _conv_backward,
    fake=_fake_backward,
    **_second_derivatives,
    vmap=folded(_conv_backward, (1, 1, 0, 0), (1, 0, 0), mask=True),
    sharding=[((0, "sum", "sum"), (0, 0, None, None)), ((1, 0, 0), (1, 1, 0, 0))],
    flops=_flops_backward,
)
