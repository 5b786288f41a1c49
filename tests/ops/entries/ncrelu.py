import torch
from torch import Tensor

from ops import NCReLU, ncrelu
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X = torch.ones(2, 3, 5, 4)
SIGNS = torch.zeros(15, dtype=torch.uint8)  # of 60 elements, for X as a gradient with dim=3


def reference(x: Tensor, dim: int = 1) -> Tensor:
    """Concatenate both halves; NaN stays NaN, and its gradient is zero."""
    positive = torch.where(x > 0, x, x.detach().clamp(min=0))
    negative = torch.where(x < 0, x, x.detach().clamp(max=0))
    return torch.cat((positive, negative), dim)


OPERATOR = Operator(
    name="ncrelu",
    function=ncrelu,
    reference=reference,
    cases=(
        Case(((2, 3, 5, 4),)),
        Case(((2, 3, 5, 4),), {"dim": 0}),
        Case(((2, 3, 5, 4),), {"dim": -1}),
        Case(((37,),), {"dim": 0}),
        Case(((3, 8, 4),), {"dim": -2}),
        Case(((2, 3, 2, 3, 2),)),
    ),
    resized=((3, 5, 6, 5),),
    empty=(Case(((0,),), {"dim": 0}), Case(((0, 3, 5, 4),)), Case(((2, 0, 5, 4),))),
    bulk=Case(((4, 8, 47, 51),)),
    huge=Case(((3, 66, 2**12, 2**12),)),
    autocast="input",
    saves="own",
    autograd_variant="ncrelu_with_signs",
    module=lambda **_: NCReLU(),
    wrong=(
        Wrong(lambda: ncrelu(1.0), TypeError, "input … Tensor … float"),
        Wrong(lambda: ncrelu(X.long()), NotImplementedError, "int64 … input … float32"),
        Wrong(lambda: ncrelu(X, 4), IndexError, "dim … 4 … [-4, 3]"),
        Wrong(lambda: ncrelu(X, -5), IndexError, "dim … -5 … [-4, 3]"),
        Wrong(lambda: ncrelu(X[0, 0, 0, 0]), IndexError, "input … dimension … scalar"),
        Wrong(lambda: ncrelu(X, 1.0), TypeError, "dim … int … float"),
        Wrong(lambda: ncrelu(X, True), TypeError, "dim … int … bool"),
        Wrong(lambda: ncrelu(X, "C"), TypeError, "dim … int … str"),
        Wrong(lambda: raw.ncrelu(X, 4), RuntimeError, "dim … [-4, 3] … 4"),
        Wrong(lambda: raw.ncrelu(X[0, 0, 0, 0], 0), RuntimeError, "dimension"),
        Wrong(lambda: raw.ncrelu(X.bool(), 1), RuntimeError, "bool … float32"),
        Wrong(lambda: raw.ncrelu_with_signs(X, 4), RuntimeError, "dim … [-4, 3] … 4"),
        Wrong(lambda: raw.ncrelu_with_signs(X.bool(), 1), RuntimeError, "bool … float32"),
        Wrong(
            lambda: raw.ncrelu_with_signs_backward(X, SIGNS, 1, False),
            RuntimeError,
            "grad_output … even … 1 … [2, 3, 5, 4]",
        ),
        Wrong(
            lambda: raw.ncrelu_with_signs_backward(X[0], SIGNS, -1, True),
            RuntimeError,
            "channels_last … [3, 5, 4]",
        ),
        Wrong(
            lambda: raw.ncrelu_with_signs_backward(X, SIGNS[1:], 3, False),
            RuntimeError,
            "signs … [15] … [14]",
        ),
        Wrong(
            lambda: raw.ncrelu_with_signs_backward(X, SIGNS.char(), 3, False),
            RuntimeError,
            "signs … dtype",
        ),
        Wrong(
            lambda: raw.ncrelu_with_signs_backward(X.int(), SIGNS, 3, False),
            RuntimeError,
            "int32 … float32",
        ),
    ),
)
