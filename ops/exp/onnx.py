"""exp in ONNX."""

from ops.core.onnx import Function, OnnxOperator, Opset, T, unary


def _function(op: Opset) -> Function:
    def Exp(X: T) -> T:
        """Exponential function."""
        return op.Exp(X)

    return Exp


OPERATORS = {"exp": OnnxOperator(_function, unary)}
