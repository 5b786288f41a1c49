from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import LLTM, lltm
from tests.ops.operator_entry import Case, Operator, Shape, Wrong, raw


def reference(
    sequence: Tensor, weights: Tensor, bias: Tensor | None, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute each step as PyTorch's tutorial on C++ extensions does."""
    outputs = []
    for input in sequence:
        gates = F.linear(torch.cat((h, input), -1), weights, bias)
        input_gate, output_gate, candidate = gates.chunk(3, -1)
        c = c + F.elu(candidate) * torch.sigmoid(input_gate)
        h = torch.tanh(c) * torch.sigmoid(output_gate)
        outputs.append(h)
    return torch.stack(outputs), h, c


def shapes(t: int, n: int, i: int, s: int, bias: bool = True) -> tuple[Shape | None, ...]:
    return (t, n, i), (3 * s, s + i), (3 * s,) if bias else None, (n, s), (n, s)


X, W, B, H = (torch.ones(s) for s in ((5, 2, 3), (12, 7), (12,), (2, 4)))
Y, SAVED, MASK = torch.ones(5, 2, 4), torch.ones(5, 2, 16), [True] * 5

OPERATOR = Operator(
    name="lltm",
    function=lltm,
    reference=reference,
    cases=(
        Case(shapes(2, 4, 7, 3)),
        Case(shapes(2, 3, 2, 9, bias=False)),
        Case(shapes(1, 2, 1, 1)),
        Case(shapes(1, 20, 2, 17)),
    ),
    resized=shapes(4, 3, 7, 3),
    empty=(Case(shapes(2, 0, 3, 4)), Case(shapes(2, 2, 0, 4)), Case(shapes(2, 2, 3, 0))),
    bulk=Case(shapes(2, 3001, 3, 5)),
    huge=Case(shapes(3, 2**26 + 3, 17, 1)),
    autocast="region",
    module=partial(LLTM, 7, 3),
    saves="both",
    roundings=6,
    uses_matmul=True,
    batch_dim=1,
    state=2,
    largest=1e3,
    wrong=(
        Wrong(lambda: lltm(1, W, B, H, H), TypeError, "sequence … Tensor … int"),
        Wrong(lambda: lltm(X, W, B, None, H), TypeError, "h0 … NoneType"),
        Wrong(lambda: lltm(X, W, [0], H, H), TypeError, "bias … list"),
        Wrong(lambda: lltm(X.int(), W, B, H, H), NotImplementedError, "int32 … sequence"),
        Wrong(lambda: lltm(X, W.double(), B, H, H), RuntimeError, "weights … float32 … float64"),
        Wrong(
            lambda: lltm(X[None], W, B, H, H), RuntimeError, "sequence … [T, N, I] … [1, 5, 2, 3]"
        ),
        Wrong(lambda: lltm(X[:0], W, B, H, H), RuntimeError, "sequence … at least one … [0, 2, 3]"),
        Wrong(lambda: lltm(X, W[1:], B, H, H), RuntimeError, "weights … [12, 7] … [11, 7]"),
        Wrong(lambda: lltm(X, W, B, H[:1], H), RuntimeError, "h0 … [2, 4] … [1, 4]"),
        Wrong(
            lambda: lltm(X, W, B, H[None], H), RuntimeError, "h0 … [N, S] … [5, 2, 3] … [1, 2, 4]"
        ),
        Wrong(lambda: lltm(X[:, 0], W, B, H, H), RuntimeError, "h0 … [S] … [5, 3] … [2, 4]"),
        Wrong(lambda: lltm(X[:, 0], W, B, H[0], H[0, 1:]), RuntimeError, "c0 … [1, 4] … [1, 3]"),
        Wrong(lambda: lltm(X[:0, 0], W, B, H[0], H[0]), RuntimeError, "at least one … [0, 1, 3]"),
        Wrong(lambda: lltm(X, W, B, H, H[:, 1:]), RuntimeError, "c0 … [2, 4] … [2, 3]"),
        Wrong(
            lambda: raw.lltm_backward(X, None, None, X, W, B, H, H, X, SAVED, MASK),
            RuntimeError,
            "grad_output … [5, 2, 4] … [5, 2, 3]",
        ),
        Wrong(
            lambda: raw.lltm_backward(None, H, None, X, W, B, H, H, Y, SAVED.half(), MASK),
            RuntimeError,
            "saved … float32 … float16",
        ),
    ),
)
