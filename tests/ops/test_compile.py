"""opcheck, torch.compile and torch.export."""

import pytest
import torch

from ops import BatchNormAct2d
from tests.ops.operator_entry import Case, raw
from tests.ops.operators import OPERATORS, each_case, each_device, each_operator
from tests.ops.tensors import (
    CHANNELS_LAST,
    LAYOUTS,
    as_tuple,
    gradients,
    inputs,
    random,
    record,
)


def all_calls(op, case, tensors):
    """Return the calls of forward and backward, and of forward without gradients."""
    calls = record(op, case, *tensors)
    if op.autograd_variant:
        calls += record(op, case, *(x.detach() for x in tensors))
    return calls


@each_device
@pytest.mark.parametrize(
    "layout",
    ["contiguous", "channels_last", pytest.param("transposed", marks=pytest.mark.exhaustive)],
)
@each_operator
def test_opcheck(op, layout, device):
    if layout == "channels_last" and not any(len(s) in CHANNELS_LAST for s in op.cases[0].shapes):
        pytest.skip("has no images")
    tensors = inputs(op.cases[0], torch.float32, device, layout, requires_grad=True)
    calls = all_calls(op, op.cases[0], tensors)
    assert {call.op._opname for call in calls} == set(op.names)
    for call in calls:
        forward = not call.op._opname.endswith("_backward")
        traced = forward or layout == "contiguous"  # second derivatives in one layout: slow
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
def test_fake_output_has_real_strides(op, case, layout, device):
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
    registered.discard("depthwise_conv2d_kernel")  # of the CUDA library: names the kernel that runs
    assert registered == {name for op in OPERATORS for name in op.names}


def with_arithmetic(op, kwargs):
    """Return a function with elementwise operators before and after `op`, for fusion."""

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
@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(op, case, id=f"{op} {case}")
        for op in OPERATORS
        for case in op.cases
        if None in case.shapes
    ],
)
def test_compile_without_optional_tensors(op, case, device):
    function = with_arithmetic(op, case.kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    check_compiled(compiled, function, inputs(case, torch.float32, device, requires_grad=True))


@each_device
@each_operator
def test_compile_dynamic_shapes(op, device):
    case, other = op.cases[0], Case(op.resized, op.cases[0].kwargs)
    function = with_arithmetic(op, case.kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    check_compiled(compiled, function, inputs(case, torch.float32, device, requires_grad=True))
    with torch.compiler.set_stance("fail_on_recompile"):
        check_compiled(compiled, function, inputs(other, torch.float32, device, requires_grad=True))


# An elementwise operator, several outputs, images in channels-last, several differentiable inputs;
# the others take a minute.
IN_CI = ("gelu", "batch_norm_act2d", "depthwise_conv2d", "lltm")


@each_device
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=str(op), marks=[] if op.name in IN_CI else pytest.mark.exhaustive)
        for op in OPERATORS
    ],
)
def test_compile_with_inductor(op, device):
    if " " in torch.__file__:
        pytest.skip("Inductor cannot link with a torch whose path holds a space")
    function = with_arithmetic(op, op.cases[0].kwargs)
    tensors = inputs(op.cases[0], torch.float32, device, "channels_last", requires_grad=True)
    torch._dynamo.reset()
    scalar = {"cpp.simdlen": 1}  # the C++ around the operators compiles in two thirds of the time
    check_compiled(torch.compile(function, fullgraph=True, options=scalar), function, tensors)


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


def test_evaluation_compiles_for_any_batch_size():
    layer = BatchNormAct2d(3).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (2, 3):
        x = torch.randn(n, 3, 4, 4)
        torch.testing.assert_close(compiled(x), layer(x))
