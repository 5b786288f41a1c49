"""gelu in the tests' table."""

import torch

from ops import GELU, gelu
from tests.ops.operator_entry import Case, Operator, Wrong, raw

X = torch.ones(2, 3, 5, 4)

OPERATOR = Operator(
    name="gelu",
    function=gelu,
    reference=lambda x: x * torch.sigmoid(1.702 * x),
    cases=(
        Case(((2, 3, 5, 4),)),
        Case(((),)),
        Case(((37,),)),
        Case(((3, 1),)),
        Case(((2, 3, 2, 3, 2),)),
    ),
    resized=((3, 3, 6, 5),),
    empty=(Case(((0,),)), Case(((2, 0, 3, 4),))),
    bulk=Case(((4, 8, 47, 51),)),
    huge=Case(((3, 2**30 + 9),)),
    autocast="input",
    module=lambda **_: GELU(),
    wrong=(
        Wrong(lambda: gelu([1.0]), TypeError, "input … Tensor … list"),
        Wrong(lambda: gelu(X.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: raw.gelu(X.int()), RuntimeError, "Int … Float"),
        Wrong(lambda: raw.gelu(X.cfloat()), RuntimeError, "Complex … Float"),
        Wrong(lambda: raw.gelu(X.to_sparse()), NotImplementedError, "Sparse"),
        Wrong(
            lambda: raw.gelu_backward(X[:1], X),
            RuntimeError,
            "grad_output … [2, 3, 5, 4] … [1, 3, 5, 4]",
        ),
        Wrong(
            lambda: raw.gelu_backward(X.double(), X),
            RuntimeError,
            "grad_output … Float … Double",
        ),
    ),
)
