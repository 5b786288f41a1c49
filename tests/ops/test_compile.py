"""opcheck, torch.compile and torch.export."""

import pytest
import torch
from torch.func import vjp

from tests.ops.operator_entry import Case, raw
from tests.ops.operators import OPERATORS, each_case, each_device, each_operator
from tests.ops.tensors import (
    CHANNELS_LAST,
    LAYOUTS,
    Recorder,
    as_tuple,
    gradients,
    inputs,
    random,
    record,
)


def all_calls(op, case, tensors):
    """Those of a training and, where autograd runs another operator, those of torch.func."""
    calls = record(op, case, *tensors)
    if op.recorded:
        with Recorder() as recorder:
            detached = [x.detach() for x in tensors]
            output, pull = vjp(lambda *xs: op.function(*xs, **case.kwargs), *detached)
            pull(torch.ones_like(output))
        calls += recorder.calls
    return calls


@each_device
@pytest.mark.parametrize(
    "layout",
    ["contiguous", "channels_last", pytest.param("transposed", marks=pytest.mark.exhaustive)],
)
@each_operator
def test_opcheck(op, layout, device):
    """PyTorch's own checks of schema, fakes and gradients, on the calls that a training makes."""
    if layout == "channels_last" and not any(len(s) in CHANNELS_LAST for s in op.cases[0].shapes):
        pytest.skip("has no images")
    tensors = inputs(op.cases[0], torch.float32, device, layout, requires_grad=True)
    calls = all_calls(op, op.cases[0], tensors)
    assert {call.op._opname for call in calls} == set(op.names)
    for call in calls:
        forward = not call.op._opname.endswith("_backward")
        traced = forward or layout == "contiguous"  # second derivatives once: they take long
        args = [
            x.detach().requires_grad_(traced and x.is_floating_point())
            if isinstance(x, torch.Tensor)
            else x
            for x in call.args
        ]
        torch.library.opcheck(call.op, args)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_fake_output_is_laid_out_as_the_real_one(op, case, layout, device):
    """Also where opcheck's few samples do not reach: every call, its backward and its strides."""
    tensors = inputs(case, torch.float16, device, layout, requires_grad=True)
    for call in all_calls(op, case, tensors):
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = call.op(
                *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call.args)
            )
        for fake, real in zip(as_tuple(fakes), call.outputs, strict=True):
            assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
            assert fake.stride() == real.stride()


def test_table_covers_every_operator():
    registered = {
        name.removeprefix("lenet_ops::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("lenet_ops::")
    }
    assert registered == {name for op in OPERATORS for name in op.names}


def surrounded(op, kwargs):
    """Returns a function that the compiler can fuse with: arithmetic around the operator."""

    def function(*tensors):
        output = op.function(*(None if x is None else x * 1.5 for x in tensors), **kwargs)
        return tuple(y.sin() for y in as_tuple(output))

    return function


def check_compiled(compiled, function, tensors):
    actual, expected = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(actual, expected)
    grads = [random(y.shape, y.dtype, y.device, seed=9) for y in expected]
    torch.testing.assert_close(
        gradients(actual, tensors, grads), gradients(expected, tensors, grads)
    )


@each_device
@each_case
def test_compile(op, case, device):
    """Forward and backward in one graph each."""
    function = surrounded(op, case.kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    check_compiled(compiled, function, inputs(case, torch.float32, device, requires_grad=True))


@each_device
@each_operator
def test_compile_dynamic_shapes(op, device):
    """One compilation serves every size."""
    case, other = op.cases[0], Case(op.resized, op.cases[0].kwargs)
    function = surrounded(op, case.kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    check_compiled(compiled, function, inputs(case, torch.float32, device, requires_grad=True))
    with torch.compiler.set_stance("fail_on_recompile"):
        check_compiled(compiled, function, inputs(other, torch.float32, device, requires_grad=True))


@each_device
@each_operator
def test_compile_with_inductor(op, device):
    """The default compiler: it relies on the strides that the fakes promise."""
    if " " in torch.__file__:
        pytest.skip("Inductor cannot link with a torch whose path holds a space")
    function = surrounded(op, op.cases[0].kwargs)
    tensors = inputs(op.cases[0], torch.float32, device, "channels_last", requires_grad=True)
    torch._dynamo.reset()
    check_compiled(torch.compile(function, fullgraph=True), function, tensors)


class Wrapped(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.function = op.function
        self.kwargs = op.cases[0].kwargs

    def forward(self, *tensors):
        return self.function(*tensors, **self.kwargs)


@each_device
@each_operator
def test_export(op, device):
    """The exported program holds our operator and takes the sizes that were declared dynamic."""
    case = op.cases[0]
    tensors, others = inputs(case, torch.float32, device), inputs(Case(op.resized), device=device)
    auto = torch.export.Dim.AUTO
    sizes = [
        tuple(auto if a != b else None for a, b in zip(shape, other, strict=True))
        for shape, other in zip(case.shapes, op.resized, strict=True)
    ]
    program = torch.export.export(Wrapped(op), tuple(tensors), dynamic_shapes=(tuple(sizes),))
    assert getattr(raw, op.name).default in {node.target for node in program.graph.nodes}
    for args in (tensors, [x.float() for x in others]):
        expected = op.function(*args, **case.kwargs)
        torch.testing.assert_close(program.module()(*args), expected)
