from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import DepthwiseConv2d
from ops import depthwise_conv2d as conv
from tests.ops.operator_entry import Case, Operator, Wrong, pairs, raw

X, W = torch.ones(2, 3, 5, 4), torch.ones(3, 1, 3, 3)
LISTS = ([1, 1], [0, 0], [1, 1])  # stride, padding, dilation as torch.ops takes them


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """Sum over the taps; test_depthwise_conv2d.py compares with F.conv2d."""
    (sh, sw), (ph, pw), (dh, dw) = pairs(stride, padding, dilation)
    kh, kw = weight.shape[-2:]
    ho = (x.shape[-2] + 2 * ph - dh * (kh - 1) - 1) // sh + 1
    wo = (x.shape[-1] + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    padded = F.pad(x, (pw, pw, ph, ph))
    out = x.new_zeros(*x.shape[:-2], ho, wo)
    for a in range(kh):
        for b in range(kw):
            tap = padded[..., a * dh : a * dh + (ho - 1) * sh + 1 : sh, :]
            tap = tap[..., b * dw : b * dw + (wo - 1) * sw + 1 : sw]
            out = out + weight[:, 0, a, b, None, None] * tap
    return out if bias is None else out + bias[:, None, None]


OPERATOR = Operator(
    name="depthwise_conv2d",
    function=conv,
    reference=reference,
    cases=(
        Case(((2, 3, 5, 4), (3, 1, 3, 3), (3,)), {"padding": 1}),
        Case(((2, 3, 5, 4), (3, 1, 2, 3), None), {"stride": (2, 1)}),
        Case(((1, 2, 7, 8), (2, 1, 3, 2), (2,)), {"dilation": (2, 3), "padding": (2, 3)}),
        Case(((2, 1, 3, 3), (1, 1, 1, 1), (1,)), {"padding": 3, "stride": 2}),
        Case(((4, 6, 5), (4, 1, 5, 5), None), {"padding": 2}),
        Case(((1, 17, 3, 19), (17, 1, 3, 3), (17,)), {"padding": (0, 1)}),
    ),
    resized=((3, 3, 7, 6), (3, 1, 3, 3), (3,)),
    empty=(
        Case(((0, 3, 5, 4), (3, 1, 3, 3), (3,))),
        Case(((2, 0, 5, 4), (0, 1, 3, 3), (0,))),
        Case(((2, 3, 0, 4), (3, 1, 3, 3), (3,)), {"padding": 2}),
    ),
    bulk=Case(((4, 8, 47, 51), (8, 1, 5, 5), (8,)), {"padding": 2}),
    huge=Case(((3, 66, 2**12, 2**12), (66, 1, 3, 3), (66,)), {"padding": 1}),
    autocast="region",
    nan_gradient=1,
    module=partial(DepthwiseConv2d, 3, 3, padding=1),
    peer=partial(nn.Conv2d, 3, 3, 3, padding=1, groups=3),
    wrong=(
        Wrong(lambda: conv(1, W), TypeError, "input … int"),
        Wrong(lambda: conv(X, None), TypeError, "weight … NoneType"),
        Wrong(lambda: conv(X, W, [0]), TypeError, "bias … list"),
        Wrong(lambda: conv(X.int(), W.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: conv(X, W.double()), RuntimeError, "weight … dtype … float32 … float64"),
        Wrong(
            lambda: conv(X, W, torch.ones(3).half()),
            RuntimeError,
            "bias … dtype … float32 … float16",
        ),
        Wrong(lambda: conv(X[0, 0], W), RuntimeError, "input … [N, C, H, W] … [5, 4]"),
        Wrong(
            lambda: conv(X, W[:2]),
            RuntimeError,
            "weight … [C, 1, kH, kW] … C = 3 … [2, 1, 3, 3]",
        ),
        Wrong(
            lambda: conv(X, W.expand(3, 2, 3, 3)),
            RuntimeError,
            "weight … [C, 1, kH, kW] … [3, 2, 3, 3]",
        ),
        Wrong(lambda: conv(X, W, torch.ones(4)), RuntimeError, "bias … [3] … [4]"),
        Wrong(lambda: conv(X, torch.ones(3, 1, 6, 3)), RuntimeError, "kernel … 6 … 5"),
        Wrong(lambda: conv(X, W, stride=0), RuntimeError, "stride … at least 1 … 0"),
        Wrong(lambda: conv(X, W, padding=(0, -1)), RuntimeError, "padding … at least 0 … (0, -1)"),
        Wrong(lambda: conv(X, W, dilation=0), RuntimeError, "dilation … at least 1 … 0"),
        Wrong(lambda: conv(X, W, stride=(1, 2, 3)), TypeError, "stride … pair … (1, 2, 3)"),
        Wrong(lambda: conv(X, W, stride=True), TypeError, "stride … pair … True"),
        Wrong(
            lambda: conv(X, W, stride=2**70), RuntimeError, f"stride … at most {2**31} … {2**70}"
        ),
        Wrong(lambda: conv(X, W, stride=1.5), TypeError, "stride … pair … 1.5"),
        Wrong(
            lambda: raw.depthwise_conv2d(X[0], W, None, *LISTS),
            RuntimeError,
            "input … [N, C, H, W] … [3, 5, 4]",
        ),
        Wrong(
            lambda: raw.depthwise_conv2d(X, W, None, [1, 1, 1], *LISTS[1:]),
            RuntimeError,
            "stride … two",
        ),
        Wrong(
            lambda: raw.depthwise_conv2d(X, W, None, [0, 1], *LISTS[1:]),
            RuntimeError,
            "stride … at least 1 … 0",
        ),
        Wrong(
            lambda: raw.depthwise_conv2d(X, W[:, :, :0], None, *LISTS),
            RuntimeError,
            "weight … [3, 1, 0, 3]",
        ),
        Wrong(
            lambda: raw.depthwise_conv2d(X, W, None, [1, 1], [0, 0], [2**62, 1]),
            RuntimeError,
            "dilation … at most 2147483648 … 4611686018427387904",
        ),
        Wrong(
            lambda: raw.depthwise_conv2d_backward(X, X, W, *LISTS, [True] * 3),
            RuntimeError,
            "grad_output … [2, 3, 3, 2] … [2, 3, 5, 4]",
        ),
    ),
)
