"""gelu in ONNX."""

from onnx import TensorProto
from onnx.helper import make_tensor

from ops.core.onnx import Function, OnnxOperator, Opset, T, unary

_SLOPE = make_tensor("slope", TensorProto.DOUBLE, [], [1.702])  # precise enough for every dtype


def _function(op: Opset) -> Function:
    def GELU(X: T) -> T:
        """Sigmoid approximation of GELU: x * sigmoid(1.702 x)."""
        slope = op.CastLike(op.Constant(value=_SLOPE), X)
        return op.Mul(X, op.Sigmoid(op.Mul(slope, X)))

    return GELU


OPERATORS = {"gelu": OnnxOperator(_function, unary)}
