"""Max pooling: the maximum of each sliding window."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ops.core import check, layout, windows
from ops.core.calls import public
from ops.core.registration import register
from ops.core.rules import folded, linear
from ops.core.windows import Size

_pool = torch.ops.lenet_ops.max_pool2d.default
_with_indices = torch.ops.lenet_ops.max_pool2d_with_indices.default
_with_indices_backward = torch.ops.lenet_ops.max_pool2d_with_indices_backward.default

_MAX_TAPS = 2**31  # largest kH·kW
_BYTE_TAPS = 255  # kByteTaps - 1 in op.h: largest window with uint8 indices
_NO_TAP = {torch.uint8: 255, torch.int64: -1}  # kNoTap: index of a window of padding alone


def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Take the maximum of each sliding window, as ``F.max_pool2d`` does.

    out[n, c, i, j] = max over k, l of x[n, c, i·sH − pH + k·dH, j·sW − pW + l·dW]; padding is −∞.
    The gradient of out[n, c, i, j] goes to the first maximum of the window in row-major order. NaN
    is larger than any number; of several NaNs, the last one is the maximum.
    Autograd saves the index of the maximum within its window: one byte per output (eight bytes for
    windows of more than 255 pixels). PyTorch saves eight bytes per output and the input. Without
    gradients no indices are computed.
    Unlike ``F.max_pool2d``, there are no integer dtypes and no ``return_indices``.

    Args:
        input: [N, C, H, W] or [C, H, W], any strides; float64, float32, bfloat16 or float16.
        kernel_size: window size, int or pair (kH, kW).
        stride: step between windows, int or pair; None or []: kernel_size.
        padding: int or pair, −∞ added on both sides; at most half of kernel_size.
        dilation: spacing between the elements of a window, int or pair.
        ceil_mode: round the output size up instead of down; a window that would start in the
            padding on the right or at the bottom is ignored.

    Returns:
        [N, C, Ho, Wo] (or [C, Ho, Wo]) in the dtype and memory format of `input`, where
        Ho = ⌊(H + 2 pH − dH (kH − 1) − 1) / sH⌋ + 1, or ⌈…⌉ with `ceil_mode`; Wo likewise.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        RuntimeError: a window larger than the padded image, an empty image, not 3 or 4 dimensions.
    """
    stride = _or_kernel_size(stride, kernel_size)
    return _call(input, kernel_size, stride, padding, dilation, ceil_mode)


_call = public(max_pool2d, _pool, rank=4)


def _or_kernel_size(stride: Size | None, kernel_size: Size) -> Size:
    """Return `stride`, or `kernel_size` instead of None or, as in PyTorch, an empty list."""
    if stride is None or (isinstance(stride, (tuple, list)) and not stride):
        return kernel_size
    return stride


class MaxPool2d(nn.MaxPool2d):
    """Apply :func:`max_pool2d`, as ``nn.MaxPool2d`` without ``return_indices``."""

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        name = type(self).__name__
        check.boolean(name, "ceil_mode", ceil_mode)
        kernel_size, stride, padding, dilation = windows.pairs(
            name,
            kernel_size=kernel_size,
            stride=_or_kernel_size(stride, kernel_size),
            padding=padding,
            dilation=dilation,
        )
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)

    def forward(self, input: Tensor) -> Tensor:
        """Return max_pool2d of `input` [N, C, H, W] or [C, H, W]."""
        geometry: Any = (self.kernel_size, self.stride, self.padding, self.dilation)
        arguments = (*geometry, self.ceil_mode)
        return max_pool2d(input, *arguments)


def _output_size(op: str, height: Any, width: Any, *arguments: Any) -> list[int]:
    """Check the arguments of a fake; return the output's height and width."""
    kernel_size, *spacing, ceil_mode = arguments
    windows.check_pair(op, "kernel_size", kernel_size)
    size = windows.output_size(op, (height, width), kernel_size, *spacing, ceil_mode=ceil_mode)
    check.argument(op, "input without pixels", height > 0 and width > 0)
    check.argument(op, "kernel_size", kernel_size[0] * kernel_size[1] <= _MAX_TAPS)
    limits = zip(spacing[1], kernel_size, strict=True)
    check.argument(op, "padding", all(padding <= side // 2 for padding, side in limits))
    return size


def _index_type(kernel_size: Sequence[int]) -> torch.dtype:
    """Return the dtype of the indices: uint8 up to 255 taps, else int64."""
    return torch.uint8 if kernel_size[0] * kernel_size[1] <= _BYTE_TAPS else torch.int64


def _fake(input: Tensor, *arguments: Any, op: str = "max_pool2d") -> Tensor:
    windows.check_image(op, input)
    return layout.resized(input, *_output_size(op, *input.shape[2:], *arguments))


def _fake_with_indices(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    out = _fake(input, *arguments, op="max_pool2d_with_indices")
    return out, torch.empty_like(out, dtype=_index_type(arguments[0]))


def _fake_backward(grad_output: Tensor, indices: Tensor, *arguments_and_image: Any) -> Tensor:
    op = "max_pool2d_with_indices_backward"
    *arguments, height, width, channels_last = arguments_and_image
    windows.check_image(op, grad_output, "grad_output")
    shape = (*grad_output.shape[:2], *_output_size(op, height, width, *arguments))
    check.same(op, "grad_output", grad_output, shape, grad_output.dtype)
    check.same(op, "indices", indices, shape, _index_type(arguments[0]))
    return layout.empty(grad_output, (*shape[:2], height, width), channels_last)


def _gather(image: Tensor, taps: Tensor, *arguments: Any) -> Tensor:
    """Gather the pixels of `image` at `taps`, each in its window; differentiable to any order.

    A window of padding alone has none, and gets 0.
    """
    kernel_size, stride, padding, dilation, *_ = arguments
    padding_alone = taps == _NO_TAP[taps.dtype]
    tap = taps.long()
    first_row, first_column = (
        torch.arange(count, device=taps.device) * s - p
        for count, s, p in zip(taps.shape[2:], stride, padding, strict=True)
    )
    row = tap // kernel_size[1] * dilation[0] + first_row[:, None]
    column = tap % kernel_size[1] * dilation[1] + first_column
    pixel = (row * image.shape[3] + column).masked_fill(padding_alone, 0)
    flat = (*image.shape[:2], -1)  # flatten has no vmap rule in forward mode
    values = image.reshape(flat).gather(2, pixel.reshape(flat)).reshape(taps.shape)
    return values.masked_fill(padding_alone, 0)


def _jvp(
    args: Sequence[Any], outputs: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, None]:
    return _gather(cast(Tensor, tangents[0]), outputs[1], *args[1:]), None


# All derivatives, also of torch.func and forward mode, are those of max_pool2d_with_indices.
register(
    _with_indices,
    fake=_fake_with_indices,
    backward=_with_indices_backward,
    jvp=_jvp,
    vmap=folded(_with_indices, (0,), (0, 0)),
    sharding=[((0, 0), (0,)), ((1, 1), (1,))],
)
register(
    _pool,
    fake=_fake,
    vmap=folded(_pool, (0,), (0,)),
    sharding=[((0,), (0,)), ((1,), (1,))],
    autograd_variant=_with_indices,
    decomposition=torch.ops.aten.max_pool2d.default,
)
register(
    _with_indices_backward,
    **linear(_with_indices_backward, _gather),
    fake=_fake_backward,
    vmap=folded(_with_indices_backward, (0, 0), (0,)),
    sharding=[((0,), (0, 0)), ((1,), (1, 1))],
)
