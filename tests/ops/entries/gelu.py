import torch

from ops import GELU, gelu
from tests.ops.operator_entry import ELEMENTWISE, Operator, Wrong, raw

X = torch.ones(2, 3, 5, 4)

OPERATOR = Operator(
    name="gelu",
    function=gelu,
    reference=lambda x: x * torch.sigmoid(1.702 * x),
    **ELEMENTWISE,
    autocast="input",
    module=lambda **_: GELU(),
    wrong=(
        Wrong(lambda: gelu([1.0]), TypeError, "input … Tensor … list"),
        Wrong(lambda: gelu(X.int()), NotImplementedError, "int32 … input … float32"),
        Wrong(lambda: raw.gelu(X.int()), RuntimeError, "int32 … float32"),
        Wrong(lambda: raw.gelu(X.cfloat()), RuntimeError, "complex64 … float32"),
        Wrong(lambda: raw.gelu(X.to_sparse()), NotImplementedError, "Sparse"),
        Wrong(
            lambda: raw.gelu_backward(X[:1], X),
            RuntimeError,
            "grad_output … [2, 3, 5, 4] … [1, 3, 5, 4]",
        ),
        Wrong(
            lambda: raw.gelu_backward(X.double(), X),
            RuntimeError,
            "grad_output … float32 … float64",
        ),
    ),
)
