"""ops.export.decompositions: the operators as ATen operators in an exported program."""

import pytest
import torch

pytest.importorskip("onnxscript")

from ops import MaxPool2d
from ops.export import decompositions
from tests.ops.operators import OPERATORS
from tests.ops.tensors import as_tuple, inputs
from tests.ops.test_compile import Wrapped, all_calls

TABLE = decompositions()
LISTED = [op for op in OPERATORS if op.name != "batch_norm_act2d"]  # exports as PyTorch's operators


def test_table_has_every_forward_operator_of_inference():
    names = {op._schema.name.removeprefix("lenet_ops::") for op in TABLE}
    assert names == {op.name for op in LISTED}


@pytest.mark.parametrize("op", LISTED, ids=lambda op: op.name)
def test_all_outputs_match_the_operator(op):
    for case in op.cases:
        tensors = inputs(case, torch.float64)
        for call in all_calls(op, case, tensors):
            if call.op in TABLE:
                expected = as_tuple(call.op(*call.args))
                for y, z in zip(as_tuple(TABLE[call.op](*call.args)), expected, strict=True):
                    torch.testing.assert_close(y, z)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_exported_program_has_no_custom_operators(op):
    tensors = tuple(inputs(op.cases[0], torch.float32))
    net = Wrapped(op).eval()
    table = torch.export.default_decompositions()
    table.update(TABLE)
    program = torch.export.export(net, tensors).run_decompositions(table)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [target for target in targets if "lenet_ops" in target]
    torch.testing.assert_close(program.module()(*tensors), net(*tensors))


def test_max_pool2d_stays_one_operator():
    """Core ML Tools converts no network with max_pool2d_with_indices and unused indices."""
    net = MaxPool2d(2).eval()
    program = torch.export.export(net, (torch.randn(1, 1, 4, 4),)).run_decompositions(TABLE)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.max_pool2d.default]
