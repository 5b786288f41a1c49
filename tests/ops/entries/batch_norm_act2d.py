from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import BatchNormAct2d, batch_norm_act2d
from ops.batch_norm_act2d import ACTIVATIONS
from tests.ops.operator_entry import Case, Operator, Shape, Wrong, raw


@wraps(batch_norm_act2d)
def function(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **settings: Any
) -> Tensor:
    """Normalise in training, without running statistics."""
    return batch_norm_act2d(input, None, None, weight, bias, training=True, **settings)


def reference(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "relu",
    eps: float = 1e-5,
) -> Tensor:
    """Compute batch normalisation with operators of which PyTorch has all derivatives."""
    x = input - input.mean((0, 2, 3), keepdim=True)
    x = x / (x.square().mean((0, 2, 3), keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight.view(-1, 1, 1)
    x = x if bias is None else x + bias.view(-1, 1, 1)
    if activation == "silu":
        return x * x.sigmoid()
    if activation == "hardswish":  # CUDA's rounds its constants to float32
        return x * F.relu6(x + 3) / 6
    return ACTIVATIONS[activation](x)


class Peer(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


def shapes(n: int, c: int, h: int, w: int) -> tuple[Shape, ...]:
    return (n, c, h, w), (c,), (c,)


X, W = torch.randn(2, 3, 4, 5), torch.ones(3)
MASK = [True] * 3

OPERATOR = Operator(
    name="batch_norm_act2d",
    function=function,
    reference=reference,
    cases=(
        Case(shapes(2, 4, 3, 5), {"activation": "silu"}),
        Case(shapes(2, 3, 4, 3), {"activation": "hardswish"}),
        Case(((4, 5, 1, 2), None, None), {"activation": "identity", "eps": 0.1}),
        Case(((2, 8, 2, 2), (8,), None), {"activation": "relu6"}),
        Case(((3, 2, 3, 1), None, (2,)), {"activation": "relu"}),
    ),
    resized=shapes(5, 4, 6, 7),
    empty=(Case(shapes(2, 0, 3, 4)),),
    bulk=Case(shapes(6, 72, 31, 33), {"activation": "relu"}),
    huge=Case(shapes(3, 66, 2**12, 2**12)),
    autocast="input",
    saves="own",
    module=partial(BatchNormAct2d, 4, activation="silu"),
    peer=partial(Peer, 4),
    exported=False,
    batch_statistics=True,
    roundings=2,
    largest=1e3,
    wrong=(
        Wrong(lambda: function(1, W), TypeError, "input … int"),
        Wrong(lambda: function(X.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: function(X, W[1:]), RuntimeError, "weight … [3] … [2]"),
        Wrong(lambda: function(X, W, W.double()), RuntimeError, "bias … float32 … float64"),
        Wrong(lambda: function(X[0]), RuntimeError, "input … [N, C, H, W] … [3, 4, 5]"),
        Wrong(lambda: function(X[:1, :, :1, :1]), ValueError, "more than 1 value … [1, 3, 1, 1]"),
        Wrong(lambda: function(X, activation="elu"), ValueError, "activation … relu6 … 'elu'"),
        Wrong(
            lambda: batch_norm_act2d(X, W[1:], W, training=True),
            RuntimeError,
            "running_mean … [3] … [2]",
        ),
        Wrong(
            lambda: raw.batch_norm_act2d(X, W, W, 9, 1e-5, None, None, 0.1),
            RuntimeError,
            "activation … between 0 and 4 … 9",
        ),
        Wrong(
            lambda: raw.batch_norm_act2d_backward(X[1:], X, W, W, W, W, 1, 1e-5, MASK),
            RuntimeError,
            "grad_output … [2, 3, 4, 5] … [1, 3, 4, 5]",
        ),
        Wrong(
            lambda: raw.batch_norm_act2d_backward(X, X, W, W, W, W.half(), 1, 1e-5, MASK),
            RuntimeError,
            "rstd … float32 … float16",
        ),
    ),
)
