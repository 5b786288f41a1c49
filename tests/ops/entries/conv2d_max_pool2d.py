from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import Conv2dMaxPool2d
from ops import conv2d_max_pool2d as conv
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X, W = torch.ones(2, 3, 8, 7), torch.ones(5, 3, 3, 2)
Y, INDICES = torch.ones(2, 5, 3, 3), torch.zeros(2, 5, 3, 3, dtype=torch.uint8)
LISTS = ([1, 1], [0, 0], [1, 1], [2, 2])  # stride, padding, dilation, pool as torch.ops takes them


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    pool: int | tuple[int, int] = 2,
) -> Tensor:
    return F.max_pool2d(F.conv2d(x, weight, bias, stride, padding, dilation), pool)


OPERATOR = Operator(
    name="conv2d_max_pool2d",
    function=conv,
    reference=reference,
    cases=(
        Case(((2, 3, 8, 7), (5, 3, 3, 3), (5,))),
        Case(((2, 1, 8, 8), (1, 1, 3, 3), None), {"padding": 1}),
        Case(((3, 9, 8), (4, 3, 2, 3), (4,)), {"stride": (2, 1), "pool": (1, 2)}),
        Case(((1, 2, 9, 9), (3, 2, 2, 2), (3,)), {"dilation": 2, "pool": 3}),
    ),
    resized=((4, 3, 10, 9), (5, 3, 3, 3), (5,)),
    empty=(Case(((0, 3, 8, 7), (5, 3, 3, 2), (5,))),),
    bulk=Case(((40, 6, 22, 19), (16, 6, 5, 5), (16,)), {"padding": 1}, integers=True),
    huge=Case(((3, 66, 2**12, 2**12), (2, 66, 3, 3), (2,)), {"padding": 1}),
    autocast="region",
    saves="both",
    module=partial(Conv2dMaxPool2d, 3, 5, 3),
    roundings=3,
    largest=1e4,  # an overflow in 16 bits would change a maximum
    uses_matmul=True,
    wrong=(
        Wrong(lambda: conv(1, W), TypeError, "input … int"),
        Wrong(lambda: conv(X, None), TypeError, "weight … NoneType"),
        Wrong(lambda: conv(X, W, [0]), TypeError, "bias … list"),
        Wrong(lambda: conv(X.int(), W.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: conv(X, W.double()), RuntimeError, "weight … dtype … float32 … float64"),
        Wrong(lambda: conv(X[0, 0], W), RuntimeError, "input … [N, C, H, W] … [8, 7]"),
        Wrong(lambda: conv(X, W[:, :2]), RuntimeError, "weight … C = 3 … [5, 2, 3, 2]"),
        Wrong(lambda: conv(X, W, torch.ones(4)), RuntimeError, "bias … [5] … [4]"),
        Wrong(lambda: conv(X, torch.ones(5, 3, 9, 3)), RuntimeError, "kernel … 9 … 8"),
        Wrong(lambda: conv(X, W, stride=0), RuntimeError, "stride … at least 1 … 0"),
        Wrong(lambda: conv(X, W, padding=-1), RuntimeError, "padding … at least 0 … -1"),
        Wrong(lambda: conv(X, W, pool=0), RuntimeError, "pool … at least 1 … 0"),
        Wrong(lambda: conv(X, W, pool=7), RuntimeError, "pool … 6 x 6 … [7, 7]"),
        Wrong(
            lambda: raw.conv2d_max_pool2d_backward(X, INDICES, X, W, *LISTS, [True] * 3),
            RuntimeError,
            "grad_output … [2, 5, 3, 3] … [2, 3, 8, 7]",
        ),
        Wrong(
            lambda: raw.conv2d_max_pool2d_backward(Y, INDICES[1:], X, W, *LISTS, [True] * 3),
            RuntimeError,
            "indices … [2, 5, 3, 3] … [1, 5, 3, 3]",
        ),
    ),
)
