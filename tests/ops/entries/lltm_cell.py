from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import LLTMCell, lltm_cell
from tests.ops.operator_entry import Case, Operator, Shape, Wrong, raw


def reference(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the cell as PyTorch's tutorial on C++ extensions does."""
    gates = F.linear(torch.cat((old_h, input), -1), weights, bias)
    input_gate, output_gate, candidate = gates.chunk(3, -1)
    new_cell = old_cell + F.elu(candidate) * torch.sigmoid(input_gate)
    return torch.tanh(new_cell) * torch.sigmoid(output_gate), new_cell


def shapes(n: int, i: int, s: int, bias: bool = True) -> tuple[Shape | None, ...]:
    return (n, i), (3 * s, s + i), (3 * s,) if bias else None, (n, s), (n, s)


X, W, B, H = (torch.ones(s) for s in ((2, 3), (12, 7), (12,), (2, 4)))
SAVED, MASK = torch.ones(2, 16), [True] * 5

OPERATOR = Operator(
    name="lltm_cell",
    function=lltm_cell,
    reference=reference,
    cases=(
        Case(shapes(6, 9, 5)),
        Case(shapes(2, 3, 8, bias=False)),
        Case(shapes(1, 1, 1)),
        Case(shapes(20, 2, 17)),
    ),
    resized=shapes(4, 9, 5),
    empty=(Case(shapes(0, 3, 4)), Case(shapes(2, 0, 4)), Case(shapes(2, 3, 0))),
    bulk=Case(shapes(2101, 3, 9)),
    huge=Case(shapes(2**27 + 3, 17, 1)),
    autocast="region",
    module=partial(LLTMCell, 9, 5),
    roundings=3,
    uses_matmul=True,
    state=2,
    largest=1e3,
    wrong=(
        Wrong(lambda: lltm_cell(1, W, B, H, H), TypeError, "input … Tensor … int"),
        Wrong(lambda: lltm_cell(X, None, B, H, H), TypeError, "weights … NoneType"),
        Wrong(lambda: lltm_cell(X, W, [0], H, H), TypeError, "bias … list"),
        Wrong(lambda: lltm_cell(X, W, B, H, 0.0), TypeError, "old_cell … float"),
        Wrong(lambda: lltm_cell(X.int(), W, B, H, H), NotImplementedError, "int32 … input"),
        Wrong(
            lambda: lltm_cell(X, W.double(), B, H, H), RuntimeError, "weights … float32 … float64"
        ),
        Wrong(lambda: lltm_cell(X, W, B, H.half(), H), RuntimeError, "old_h … float32 … float16"),
        Wrong(lambda: lltm_cell(X[None], W, B, H, H), RuntimeError, "input … [N, I] … [1, 2, 3]"),
        Wrong(lambda: lltm_cell(X, W[:, 1:], B, H, H), RuntimeError, "weights … [12, 7] … [12, 6]"),
        Wrong(lambda: lltm_cell(X, W, B[1:], H, H), RuntimeError, "bias … [12] … [11]"),
        Wrong(lambda: lltm_cell(X, W, B, H[:1], H), RuntimeError, "old_h … [2, 4] … [1, 4]"),
        Wrong(lambda: lltm_cell(X[0], W, B, H, H), RuntimeError, "old_h … [S] … [3] … [2, 4]"),
        Wrong(
            lambda: lltm_cell(X[0], W, B, H[0], H[0, 1:]), RuntimeError, "old_cell … [4], got [3]"
        ),
        Wrong(lambda: lltm_cell(X, W, B, H, H[:, 1:]), RuntimeError, "old_cell … [2, 4] … [2, 3]"),
        Wrong(
            lambda: raw.lltm_cell_backward(H[:1], None, X, W, B, H, H, SAVED, MASK),
            RuntimeError,
            "grad_h … [2, 4] … [1, 4]",
        ),
        Wrong(
            lambda: raw.lltm_cell_backward(H, None, X, W, B, H, H, SAVED.half(), MASK),
            RuntimeError,
            "saved … float32 … float16",
        ),
    ),
)
