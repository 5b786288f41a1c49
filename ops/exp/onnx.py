"""exp in ONNX."""

from collections.abc import Callable
from typing import Any

from onnxscript.values import Opset

from ops.core.onnx import OnnxOperator, T, elementwise


def _function(op: Opset) -> Callable[..., Any]:
    def Exp(X: T) -> T:
        """Exponential function."""
        return op.Exp(X)

    return Exp


OPERATORS = {"exp": OnnxOperator(_function, elementwise)}
