import torch

from ops import Exp, exp
from tests.ops.operator_entry import ELEMENTWISE, Operator, Wrong, raw

X = torch.ones(2, 3, 5, 4)

OPERATOR = Operator(
    name="exp",
    function=exp,
    reference=torch.exp,
    **ELEMENTWISE,
    autocast="float32",
    saves="output",
    roundings=2,
    module=lambda **_: Exp(),
    wrong=(
        Wrong(lambda: exp(1.0), TypeError, "input … Tensor … float"),
        Wrong(lambda: exp(X.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: raw.exp(X.bool()), RuntimeError, "bool … float32"),
        Wrong(
            lambda: raw.exp_backward(X[:1], X),
            RuntimeError,
            "grad_output … [2, 3, 5, 4] … [1, 3, 5, 4]",
        ),
        Wrong(
            lambda: raw.exp_backward(X.double(), X),
            RuntimeError,
            "grad_output … output … float32 … float64",
        ),
    ),
)
