from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import DepthwiseConv1d
from ops import depthwise_conv1d as conv
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X, W = torch.ones(2, 3, 5), torch.ones(3, 1, 3)


def sides(padding: int | tuple[int, int] | str, span: int) -> tuple[int, int]:
    """Return the zeros on the left and right for a filter that spans `span` + 1 elements."""
    if padding == "causal":
        return span, 0
    if padding == "valid":
        return 0, 0
    if padding == "same":
        return span // 2, span - span // 2
    return padding if isinstance(padding, tuple) else (padding, padding)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int = 1,
    activation: str | None = None,
) -> Tensor:
    """Sum over the taps; test_depthwise_conv1d.py compares with F.conv1d."""
    taps = weight.shape[-1]
    padded = F.pad(x, sides(padding, dilation * (taps - 1)))
    length = (padded.shape[-1] - dilation * (taps - 1) - 1) // stride + 1
    out = x.new_zeros(*x.shape[:-1], length)
    for k in range(taps):
        tap = padded[..., k * dilation : k * dilation + (length - 1) * stride + 1 : stride]
        out = out + weight[:, 0, k, None] * tap
    out = out if bias is None else out + bias[:, None]
    return out * out.sigmoid() if activation == "silu" else out


class Peer(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(F.pad(input, (3, 0))))


SILU = {"padding": "causal", "activation": "silu"}

OPERATOR = Operator(
    name="depthwise_conv1d",
    function=conv,
    reference=reference,
    cases=(
        Case(((2, 3, 10), (3, 1, 4), (3,)), SILU),
        Case(((2, 3, 7), (3, 1, 3), (3,)), {"padding": 1}),
        Case(((1, 2, 11), (2, 1, 2), None), {"stride": 2, "dilation": 3, "activation": "silu"}),
        Case(((2, 5, 9), (5, 1, 5), None), {"padding": (3, 5), "stride": 3}),
        Case(((4, 6), (4, 1, 5), (4,)), {"padding": "same", "dilation": 2}),
        Case(((2, 1, 3), (1, 1, 1), (1,)), {"padding": 4, "stride": 4}),
        Case(((1, 17, 37), (17, 1, 31), (17,)), SILU),
    ),
    resized=((3, 3, 14), (3, 1, 4), (3,)),
    empty=(
        Case(((0, 3, 5), (3, 1, 3), (3,)), SILU),
        Case(((2, 0, 5), (0, 1, 3), (0,)), SILU),
        Case(((2, 3, 0), (3, 1, 3), (3,)), {"padding": 2, "activation": "silu"}),
    ),
    bulk=Case(((3, 40, 1501), (40, 1, 7), (40,)), SILU),
    huge=Case(((3, 66, 2**24), (66, 1, 3), (66,)), SILU),
    autocast="region",
    nan_gradient=1,
    roundings=2,
    largest=1e3,
    module=partial(DepthwiseConv1d, 3, 4, **SILU),
    peer=partial(Peer, 3, 3, 4, groups=3),
    wrong=(
        Wrong(lambda: conv(1, W), TypeError, "input … int"),
        Wrong(lambda: conv(X, None), TypeError, "weight … NoneType"),
        Wrong(lambda: conv(X, None, padding="causal"), TypeError, "weight … NoneType"),
        Wrong(lambda: conv(X, W, [0]), TypeError, "bias … list"),
        Wrong(lambda: conv(X.int(), W.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: conv(X, W.double()), RuntimeError, "weight … dtype … float32 … float64"),
        Wrong(
            lambda: conv(X, W, torch.ones(3).half()),
            RuntimeError,
            "bias … dtype … float32 … float16",
        ),
        Wrong(lambda: conv(X[0, 0], W), RuntimeError, "input … [N, C, T] or [C, T] … [5]"),
        Wrong(lambda: conv(X, W[:2]), RuntimeError, "weight … [C, 1, K] … C = 3 … [2, 1, 3]"),
        Wrong(lambda: conv(X, W.expand(3, 2, 3)), RuntimeError, "weight … [C, 1, K] … [3, 2, 3]"),
        Wrong(lambda: conv(X, W, torch.ones(4)), RuntimeError, "bias … [3] … [4]"),
        Wrong(lambda: conv(X, torch.ones(3, 1, 6)), RuntimeError, "kernel … 6 … 5"),
        Wrong(lambda: conv(X, W, stride=0), RuntimeError, "stride … at least 1 … 0"),
        Wrong(lambda: conv(X, W, stride=2**32), RuntimeError, "stride … at most 2147483648"),
        Wrong(lambda: conv(X, W, stride=(1, 2)), TypeError, "stride … int … tuple"),
        Wrong(lambda: conv(X, W, stride=True), TypeError, "stride … int … bool"),
        Wrong(lambda: conv(X, W, padding=(0, -1)), RuntimeError, "padding … at least 0 … (0, -1)"),
        Wrong(lambda: conv(X, W, padding=(1, 2, 3)), TypeError, "padding … pair … (1, 2, 3)"),
        Wrong(lambda: conv(X, W, padding="full"), RuntimeError, "padding … causal … 'full'"),
        Wrong(lambda: conv(X, W, None, 2, "same"), RuntimeError, "same … stride 1 … 2"),
        Wrong(lambda: conv(X, W, dilation=0), RuntimeError, "dilation … at least 1 … 0"),
        Wrong(
            lambda: conv(X, W, padding="same", dilation=1.5), TypeError, "dilation … int … float"
        ),
        Wrong(lambda: conv(X, W, activation="relu"), ValueError, "activation … silu … 'relu'"),
        Wrong(lambda: conv(X, W, activation=True), TypeError, "activation … None … silu … True"),
        Wrong(
            lambda: raw.depthwise_conv1d(X[0], W, None, 1, [0, 0], 1, False),
            RuntimeError,
            "input … [N, C, T] … [3, 5]",
        ),
        Wrong(
            lambda: raw.depthwise_conv1d(X, W, None, 1, [0, 0, 0], 1, False),
            RuntimeError,
            "padding … two",
        ),
        Wrong(
            lambda: raw.depthwise_conv1d(X, W[..., :0], None, 1, [0, 0], 1, False),
            RuntimeError,
            "weight … [3, 1, 0]",
        ),
        Wrong(
            lambda: raw.depthwise_conv1d(X, W, None, 1, [0, 0], 2**62, False),
            RuntimeError,
            "dilation … at most 2147483648 … 4611686018427387904",
        ),
        Wrong(
            lambda: raw.depthwise_conv1d_backward(X, X, W, None, 1, [0, 0], 1, False, [True] * 3),
            RuntimeError,
            "grad_output … [2, 3, 3] … [2, 3, 5]",
        ),
    ),
)
