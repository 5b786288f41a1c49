import torch

from ops import GlobalAvgPool2d, global_avg_pool2d
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X, Y = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 1, 1)

OPERATOR = Operator(
    name="global_avg_pool2d",
    function=global_avg_pool2d,
    reference=lambda x: x.mean((-2, -1), keepdim=True),
    cases=(
        Case(((2, 3, 5, 4),)),
        Case(((3, 5, 4),)),
        Case(((2, 16, 3, 3),)),
        Case(((1, 1, 7, 9),)),
        Case(((2, 5, 1, 1),)),
    ),
    resized=((3, 3, 6, 5),),
    empty=(Case(((0, 3, 5, 4),)), Case(((2, 0, 5, 4),)), Case(((2, 3, 0, 4),))),
    bulk=Case(((2, 3, 251, 293),)),
    huge=Case(((3, 66, 2**12, 2**12),)),
    autocast="input",
    saves="nothing",
    module=lambda **_: GlobalAvgPool2d(),
    wrong=(
        Wrong(lambda: global_avg_pool2d([1.0]), TypeError, "input … Tensor … list"),
        Wrong(lambda: global_avg_pool2d(X.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: global_avg_pool2d(X[0, 0]), RuntimeError, "[N, C, H, W] … [5, 4]"),
        Wrong(lambda: raw.global_avg_pool2d(X[0]), RuntimeError, "[N, C, H, W] … [3, 5, 4]"),
        Wrong(lambda: raw.global_avg_pool2d(X.long()), RuntimeError, "int64 … float32"),
        Wrong(
            lambda: raw.global_avg_pool2d_backward(X, 5, 4, False),
            RuntimeError,
            "grad_output … [N, C, 1, 1] … [2, 3, 5, 4]",
        ),
        Wrong(
            lambda: raw.global_avg_pool2d_backward(Y, -1, 4, False),
            RuntimeError,
            "height … at least 0 … -1",
        ),
    ),
)
