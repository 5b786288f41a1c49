"""The LLTM in ONNX."""

from typing import Optional, Tuple

from onnxscript import graph

from ops.core.onnx import Function, Node, OnnxOperator, Opset, T, sizes_of


def _lltm_cell_function(op: Opset) -> Function:
    def LLTMCell(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T]:
        """LLTM step: [i, o, z] = [h, x] * W' + b, c' = c + elu(z) * s(i), h' = tanh(c') * s(o)."""
        size = op.Shape(C, start=1)
        twice = op.Add(size, size)
        gates = op.Gemm(op.Concat(H, X, axis=1), W, B, transB=1)
        i = op.Slice(gates, [0], size, [1])
        o = op.Slice(gates, size, twice, [1])
        z = op.Slice(gates, twice, op.Add(twice, size), [1])
        cell = op.Add(C, op.Mul(op.Elu(z), op.Sigmoid(i)))
        return op.Mul(op.Tanh(cell), op.Sigmoid(o)), cell

    return LLTMCell


def _lltm_cell_node(input: T, weights: T, bias: Optional[T], old_h: T, old_cell: T) -> Node:
    state = sizes_of(old_cell)
    return Node([input, weights, old_h, old_cell, bias], [state, state])


def _lltm_function(op: Opset) -> Function:
    def LLTM(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T, T]:
        """LLTMCell over the steps of X, recurrently: all h, the last h, the last c."""
        size = op.Shape(C, start=1)
        twice = op.Add(size, size)
        rest = op.Add(twice, size)
        # Transposed outside: ONNX Runtime warns if the body of a Scan reads a Slice's output.
        weights_h = op.Transpose(op.Slice(W, [0], size, [1]), perm=[1, 0])
        weights_x = op.Transpose(op.Slice(W, size, op.Shape(W, start=1), [1]), perm=[1, 0])
        products = op.MatMul(X, weights_x)

        @graph()
        def step(h: T, c: T, product: T) -> Tuple[T, T, T]:
            gates = op.Add(product, op.Gemm(h, weights_h, B))
            i = op.Slice(gates, [0], size, [1])
            o = op.Slice(gates, size, twice, [1])
            z = op.Slice(gates, twice, rest, [1])
            cell = op.Add(c, op.Mul(op.Elu(z), op.Sigmoid(i)))
            new_h = op.Mul(op.Tanh(cell), op.Sigmoid(o))
            return new_h, cell, op.Identity(new_h)

        last_h, last_cell, all_h = op.Scan(H, C, products, body=step, num_scan_inputs=1)
        return all_h, last_h, last_cell

    return LLTM


def _lltm_node(sequence: T, weights: T, bias: Optional[T], h0: T, c0: T) -> Node:
    state = sizes_of(c0)
    outputs = [[*sizes_of(sequence)[:2], state[1]], state, state]
    return Node([sequence, weights, h0, c0, bias], outputs)


OPERATORS = {
    "lltm_cell": OnnxOperator(_lltm_cell_function, _lltm_cell_node),
    "lltm": OnnxOperator(_lltm_function, _lltm_node),
}
