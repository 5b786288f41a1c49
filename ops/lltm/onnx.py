"""The LLTM in ONNX."""

from typing import Optional, Tuple

from onnx import NodeProto, helper
from onnxscript import graph

from ops.core.onnx import Function, Node, OnnxOperator, Opset, T, sizes_of


def _step_function(op: Opset) -> Function:
    def LLTMStep(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T, T]:
        """LLTM over one step, X [1, N, I].

        [i, o, z] = [h, x] * W' + b, c' = c + elu(z) * s(i), h' = tanh(c') * s(o).
        """
        first = op.Constant(value_ints=[0])
        size = op.Div(op.Shape(W, end=1), op.Constant(value_ints=[3]))
        gates = op.Gemm(op.Concat(H, op.Squeeze(X, first), axis=1), W, B, transB=1)
        i, o, z = op.Split(gates, op.Concat(size, size, size, axis=0), axis=1)
        cell = op.Add(C, op.Mul(op.Elu(z), op.Sigmoid(i)))
        h = op.Mul(op.Tanh(cell), op.Sigmoid(o))
        return op.Unsqueeze(h, first), h, cell

    return LLTMStep


def _function(op: Opset) -> Function:
    def LLTM(X: T, W: T, H: T, C: T, B: Optional[T]) -> Tuple[T, T, T]:
        """LLTMStep over the steps of X, recurrently: all h, the last h, the last c."""
        size = op.Div(op.Shape(W, end=1), op.Constant(value_ints=[3]))
        sizes = op.Concat(size, size, size, axis=0)
        # Transposed outside: ONNX Runtime warns if the body of a Scan reads a Slice's output.
        weights_h = op.Transpose(op.Slice(W, [0], size, [1]), perm=[1, 0])
        weights_x = op.Transpose(op.Slice(W, size, op.Shape(W, start=1), [1]), perm=[1, 0])
        products = op.MatMul(X, weights_x)

        @graph()
        def step(h: T, c: T, product: T) -> Tuple[T, T, T]:
            gates = op.Add(product, op.Gemm(h, weights_h, B))
            i, o, z = op.Split(gates, sizes, axis=1)
            cell = op.Add(c, op.Mul(op.Elu(z), op.Sigmoid(i)))
            new_h = op.Mul(op.Tanh(cell), op.Sigmoid(o))
            return new_h, cell, op.Identity(new_h)

        last_h, last_cell, all_h = op.Scan(H, C, products, body=step, num_scan_inputs=1)
        return all_h, last_h, last_cell

    return LLTM


def _node(sequence: T, weights: T, bias: Optional[T], h0: T, c0: T) -> Node:
    state = sizes_of(c0)
    outputs = [[*sizes_of(sequence)[:2], state[1]], state, state]
    return Node([sequence, weights, h0, c0, bias], outputs)


def _unroll(node: NodeProto, steps: int, domain: str) -> list[NodeProto]:
    """Return a chain of steps: few runtimes have Scan, and ONNX Runtime's takes longer."""
    sequence, weights, h, c, *bias = node.input
    prefix = node.output[1]  # of names
    nodes, outputs = [], []
    for i in range(steps):
        index, x, *results = (f"{prefix}_{part}_{i}" for part in ("index", "x", "output", "h", "c"))
        if i == steps - 1:
            results[1:] = node.output[1:]
        nodes += [
            helper.make_node("Constant", [], [index], value_ints=[i]),
            helper.make_node("Gather", [sequence, index], [x], axis=0),
            helper.make_node("LLTMStep", [x, weights, h, c, *bias], results, domain=domain),
        ]
        output, h, c = results
        outputs.append(output)
    nodes.append(helper.make_node("Concat", outputs, node.output[:1], axis=0))
    return nodes


OPERATORS = {"lltm": OnnxOperator(_function, _node, _unroll, [_step_function])}
