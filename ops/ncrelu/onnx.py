"""ncrelu in ONNX."""

from math import inf

from ops.core.onnx import Function, Node, OnnxOperator, Opset, T, sizes_of


def _function(op: Opset) -> Function:
    def NCReLU(X: T, axis: int = 1) -> T:
        """Concatenation of positive and negative parts: concat(max(x, 0), min(x, 0))."""
        # Infinite bounds: the default bounds of Clip in ONNX Runtime are finite.
        zero = op.CastLike(0.0, X)
        least = op.CastLike(-inf, X)
        most = op.CastLike(inf, X)
        return op.Concat(op.Clip(X, zero, most), op.Clip(X, least, zero), axis=axis)

    return NCReLU


def _node(input: T, dim: int) -> Node:
    sizes = sizes_of(input)
    if sizes is not None and sizes[dim] is not None:
        sizes[dim] *= 2
    return Node([input], [sizes], {"axis": dim})


OPERATORS = {"ncrelu": OnnxOperator(_function, _node)}
