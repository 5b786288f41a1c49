import torch
import torch.nn.functional as F

from ops import MaxPool2d, max_pool2d
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X, Y = torch.ones(2, 3, 6, 4), torch.ones(2, 3, 3, 2)
INDICES = torch.zeros(2, 3, 3, 2, dtype=torch.uint8)
WINDOWS = ([2, 2], [2, 2], [0, 0], [1, 1], False)  # as torch.ops takes them

OPERATOR = Operator(
    name="max_pool2d",
    function=max_pool2d,
    reference=F.max_pool2d,
    cases=(
        Case(((2, 3, 6, 4),), {"kernel_size": 2}),
        Case(((3, 7, 5),), {"kernel_size": 2}),
        Case(((2, 5, 7, 6),), {"kernel_size": 3, "stride": 2, "padding": 1}),
        Case(((1, 2, 5, 6),), {"kernel_size": 3, "stride": 1, "padding": 1}),
        Case(((2, 6, 7, 8),), {"kernel_size": 2, "stride": 2, "padding": 1, "ceil_mode": True}),
        Case(((1, 2, 7, 9),), {"kernel_size": (3, 2), "stride": (1, 3), "dilation": (2, 1)}),
        Case(((1, 3, 5, 7),), {"kernel_size": (1, 2), "stride": 3, "ceil_mode": True}),
        Case(((1, 18, 17, 19),), {"kernel_size": (17, 16), "stride": 2}),
    ),
    resized=((3, 3, 8, 6),),
    empty=(Case(((0, 3, 6, 4),), {"kernel_size": 2}),),
    bulk=Case(((3, 24, 62, 66),), {"kernel_size": 2}),
    huge=Case(((3, 66, 2**12, 2**12),), {"kernel_size": 2}),
    autocast="input",
    saves="own",
    autograd_variant="max_pool2d_with_indices",
    module=lambda **_: MaxPool2d(2),
    wrong=(
        Wrong(lambda: max_pool2d(1.0, 2), TypeError, "input … Tensor … float"),
        Wrong(lambda: max_pool2d(X.int(), 2), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: max_pool2d(X[0, 0], 2), RuntimeError, "[N, C, H, W] … [6, 4]"),
        Wrong(lambda: max_pool2d(X, "2"), TypeError, "kernel_size … pair … '2'"),
        Wrong(lambda: max_pool2d(X, 0), RuntimeError, "kernel_size … at least 1 … 0"),
        Wrong(lambda: max_pool2d(X, 2, 0), RuntimeError, "stride … at least 1 … 0"),
        Wrong(lambda: max_pool2d(X, 2, padding=-1), RuntimeError, "padding … at least 0 … -1"),
        Wrong(lambda: max_pool2d(X, 2, padding=(1, 2)), RuntimeError, "half … [1, 1] … [1, 2]"),
        Wrong(lambda: max_pool2d(X, 2, dilation=0), RuntimeError, "dilation … at least 1 … 0"),
        Wrong(lambda: max_pool2d(X, 2, ceil_mode=1), TypeError, "ceil_mode … bool … int"),
        Wrong(lambda: max_pool2d(X, 5), RuntimeError, "kernel … 5 … 4"),
        Wrong(lambda: max_pool2d(X[..., :0], 1, ceil_mode=True), RuntimeError, "kernel … 1 … 0"),
        Wrong(lambda: raw.max_pool2d(X[0], *WINDOWS), RuntimeError, "[N, C, H, W] … [3, 6, 4]"),
        Wrong(lambda: raw.max_pool2d(X.long(), *WINDOWS), RuntimeError, "int64 … float32"),
        Wrong(
            lambda: raw.max_pool2d(X, [2, 2, 2], *WINDOWS[1:]), RuntimeError, "kernel_size … two"
        ),
        Wrong(
            lambda: raw.max_pool2d_with_indices_backward(Y[0], INDICES, *WINDOWS, 6, 4, False),
            RuntimeError,
            "grad_output … [N, C, Ho, Wo] … [3, 3, 2]",
        ),
        Wrong(
            lambda: raw.max_pool2d_with_indices_backward(X, INDICES, *WINDOWS, 6, 4, False),
            RuntimeError,
            "grad_output … [2, 3, 3, 2] … [2, 3, 6, 4]",
        ),
        Wrong(
            lambda: raw.max_pool2d_with_indices_backward(Y, INDICES[1:], *WINDOWS, 6, 4, False),
            RuntimeError,
            "indices … [2, 3, 3, 2] … [1, 3, 3, 2]",
        ),
        Wrong(
            lambda: raw.max_pool2d_with_indices_backward(Y, INDICES.long(), *WINDOWS, 6, 4, False),
            RuntimeError,
            "indices … dtype",
        ),
        Wrong(
            lambda: raw.max_pool2d_with_indices_backward(Y, INDICES, *WINDOWS, 0, 4, False),
            RuntimeError,
            "kernel … 2 … 0",
        ),
    ),
)
