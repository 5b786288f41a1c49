"""global_avg_pool2d in ONNX."""

from ops.core.onnx import Function, Node, OnnxOperator, Opset, T, sizes_of


def _function(op: Opset) -> Function:
    def GlobalAvgPool2d(X: T) -> T:
        """Mean of each channel over height and width."""
        return op.GlobalAveragePool(X)

    return GlobalAvgPool2d


def _node(input: T) -> Node:
    return Node([input], [[*sizes_of(input)[:2], 1, 1]])


OPERATORS = {"global_avg_pool2d": OnnxOperator(_function, _node)}
