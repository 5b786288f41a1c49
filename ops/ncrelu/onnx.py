"""ncrelu in ONNX."""

from ops.core.onnx import Function, Node, OnnxOperator, Opset, T, sizes_of


def _function(op: Opset) -> Function:
    def NCReLU(X: T, axis: int) -> T:
        """Concatenation of positive and negative parts: concat(max(x, 0), min(x, 0))."""
        return op.Concat(op.Relu(X), op.Min(X, op.CastLike(0.0, X)), axis=axis)

    return NCReLU


def _node(input: T, dim: int) -> Node:
    sizes = sizes_of(input)
    if sizes is not None and sizes[dim] is not None:
        sizes[dim] *= 2
    return Node([input], [sizes], {"axis": dim})


OPERATORS = {"ncrelu": OnnxOperator(_function, _node)}
