"""ONNX functions of the operators, in ONNX Runtime and in onnx's reference evaluator."""

import io
import math
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tests.ops.operator_entry import Case
from tests.ops.operators import EXPORTED, OPERATORS, each_exported, each_exported_case
from tests.ops.tensors import as_tuple, inputs, join, split

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx.reference.ops.op_scan import Scan  # noqa: E402
from onnxscript.values import Opset  # noqa: E402

from ops.export import DOMAIN, VERSION, register_symbolics, translation_table  # noqa: E402
from ops.export.operators import OPERATORS as ONNX_OPERATORS  # noqa: E402

each_opset = pytest.mark.parametrize("opset", [17, 18, 20])


class Call(nn.Module):
    """A module of one operator and its parameters."""

    def __init__(self, op, case, weights):
        super().__init__()
        self.op, self.case, self.weights = op, case, weights

    def forward(self, *data):
        return self.op.function(*join(data, self.weights), **self.case.kwargs)


def input_names(data):
    return [f"x{i}" for i in range(len(data))]


def feed(data):
    return {name: x.numpy() for name, x in zip(input_names(data), data, strict=True)}


def evaluate(model, arrays):
    """Run onnx's reference evaluator."""
    if "Scan" in str(model) and "need_context" not in vars(Scan):
        pytest.skip("this onnx version does not pass outer names to the body of Scan")
    return ReferenceEvaluator(model).run(None, arrays)


def export(op, case, tensors, opset=18, dynamic_axes=None):
    register_symbolics(opset)
    buffer = io.BytesIO()
    data, weights = split(op, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates dynamo=False
        torch.onnx.export(
            Call(op, case, weights),
            tuple(data),
            buffer,
            dynamo=False,
            opset_version=opset,
            input_names=input_names(data),
            dynamic_axes=dynamic_axes,
            custom_opsets={DOMAIN: VERSION},
        )
    model = onnx.load_model_from_string(buffer.getvalue())
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return model


def run(model, *data):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return [torch.from_numpy(y) for y in session.run(None, feed(data))]


def check(actual, expected, rtol=1e-5, atol=1e-6):
    for a, e in zip(actual, as_tuple(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


@each_exported_case
@each_opset
def test_runs_in_onnx_runtime(op, case, opset):
    tensors = inputs(case, torch.float32)
    model = export(op, case, tensors, opset)
    expected = op.function(*tensors, **case.kwargs)
    check(run(model, *split(op, tensors)[0]), expected)


@pytest.mark.parametrize("name", ONNX_OPERATORS)
def test_annotations_suit_onnxscript_on_python_3_10(name):
    """Sequence[int] of collections.abc counts as a class there, and onnxscript fails."""
    function = ONNX_OPERATORS[name].function(Opset("", 18))
    assert not [x for x in function.__annotations__.values() if isinstance(x, types.GenericAlias)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ncrelu_keeps_infinities_nan_and_signed_zeros(dtype):
    op = next(op for op in OPERATORS if op.name == "ncrelu")
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0, -2.0], dtype=dtype)
    (y,) = run(export(op, Case(((7,),), {"dim": 0}), (x,)), x)
    expected = op.function(x, dim=0)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y.signbit() | y.isnan(), expected.signbit() | expected.isnan())


@each_exported_case
def test_model_has_one_node_and_its_function(op, case):
    model = export(op, case, inputs(case, torch.float32))
    (node,) = [node for node in model.graph.node if node.domain == DOMAIN]
    (function,) = model.functions
    assert (function.domain, function.name) == (DOMAIN, node.op_type)
    assert function.doc_string
    assert {node.domain for node in function.node} == {""}
    assert {(opset.domain, opset.version) for opset in model.opset_import} == {
        ("", 18),
        (DOMAIN, VERSION),
    }


@each_exported_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_reference_evaluator_matches_the_reference(op, case, dtype):
    tensors = inputs(case, dtype)
    model = export(op, case, tensors)
    arrays = evaluate(model, feed(split(op, tensors)[0]))
    expected = op.reference(*(x if x is None else x.double() for x in tensors), **case.kwargs)
    rounding = {torch.float16: 4e-3}.get(dtype, 4 * torch.finfo(dtype).eps)
    for array, e in zip(arrays, as_tuple(expected), strict=True):
        result = torch.from_numpy(np.asarray(array))
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), e, rtol=rounding, atol=4 * rounding)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, id=f"{op} {case}", marks=[] if in_ci else [pytest.mark.exhaustive])
        for op in EXPORTED
        for index, case in enumerate(op.cases)
        for in_ci in [index == 0 and str(op) in ("ncrelu", "lltm")]
    ],
)
def test_dynamo_exporter(op, case):
    tensors = inputs(case, torch.float32)
    data, weights = split(op, tensors)
    program = torch.onnx.export(
        Call(op, case, weights).eval(),
        tuple(data),
        dynamo=True,
        opset_version=20,  # other than the translation's own
        input_names=input_names(data),
        custom_translation_table=translation_table(),
        verbose=False,
    )
    model = program.model_proto
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    expected = op.function(*tensors, **case.kwargs)
    check(run(model, *data), expected)


@each_exported
def test_dynamic_axes(op):
    case = op.cases[0]
    tensors = inputs(case, torch.float32)
    data, weights = split(op, tensors)
    others, _ = split(op, inputs(Case(op.resized), torch.float32))
    dynamic = {
        name: {i: f"{name}_{i}" for i in range(x.dim()) if x.shape[i] != other.shape[i]}
        for name, x, other in zip(input_names(data), data, others, strict=True)
    }
    model = export(op, case, tensors, dynamic_axes=dynamic)
    check(run(model, *others), op.function(*join(others, weights), **case.kwargs))
