"""exp in the tests' table."""

import torch

from ops import Exp, exp
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X = torch.ones(2, 3, 5, 4)

OPERATOR = Operator(
    name="exp",
    function=exp,
    reference=torch.exp,
    cases=(
        Case(((2, 3, 5, 4),)),
        Case(((),)),
        Case(((37,),)),
        Case(((2, 3, 2, 3, 2),)),
    ),
    resized=((3, 3, 6, 5),),
    empty=(Case(((0,),)), Case(((2, 0, 3, 4),))),
    bulk=Case(((4, 8, 47, 51),)),
    huge=Case(((3, 2**30 + 9),)),
    autocast="float32",
    saves="output",
    roundings=2,
    module=lambda **_: Exp(),
    wrong=(
        Wrong(lambda: exp(1.0), TypeError, "input … Tensor … float"),
        Wrong(lambda: exp(X.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: raw.exp(X.bool()), RuntimeError, "Bool … Float"),
        Wrong(
            lambda: raw.exp_backward(X[:1], X),
            RuntimeError,
            "grad_output … output … [2, 3, 5, 4] … [1, 3, 5, 4]",
        ),
        Wrong(
            lambda: raw.exp_backward(X.double(), X),
            RuntimeError,
            "grad_output … output … Float … Double",
        ),
    ),
)
