"""CUDA streams, devices, graphs, and tensors of more than 2³¹ elements."""

import pytest
import torch

from tests.ops.cuda_runs import assert_same_bits, run_in_graph, run_on_side_stream
from tests.ops.operators import OPERATORS, each_operator
from tests.ops.tensors import (
    as_tuple,
    gradients,
    inputs,
    join,
    lay_out,
    present,
    random,
    record,
    split,
)

pytestmark = pytest.mark.cuda


def run(op, tensors, grads):
    """Return outputs and gradients of the first case."""
    outputs = as_tuple(op.function(*tensors, **op.cases[0].kwargs))
    return [*outputs, *gradients(outputs, tensors, grads)]


def prepare(op, device="cuda"):
    """Return the first case's tensors, gradients of its outputs, and the results of `run`."""
    tensors = inputs(op.cases[0], torch.float32, device, requires_grad=True)
    outputs = as_tuple(op.function(*tensors, **op.cases[0].kwargs))
    grads = [random(y.shape, y.dtype, device, seed=9) for y in outputs]
    return tensors, grads, run(op, tensors, grads)


@each_operator
def test_runs_on_the_current_stream(op):
    tensors, grads, expected = prepare(op)
    assert_same_bits(run_on_side_stream(lambda late: run(op, late, grads), tensors), expected)


@each_operator
def test_runs_on_the_device_of_its_tensors(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, _, expected = prepare(op)
    torch.cuda.set_device(0)
    _, _, actual = prepare(op, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert {a.get_device() for a in actual} == {1}
    assert_same_bits(actual, expected)


@each_operator
def test_tensors_on_different_devices_raise(op):
    tensors = inputs(op.cases[0], torch.float32, "cuda", requires_grad=True)
    for call in record(op, op.cases[0], *tensors):
        positions = [i for i, x in enumerate(call.args) if isinstance(x, torch.Tensor)]
        for i in positions[1:]:
            args = [*call.args[:i], call.args[i].detach().cpu(), *call.args[i + 1 :]]
            with pytest.raises(RuntimeError, match="device"):
                call.op(*args)


@each_operator
def test_cuda_graph(op):
    tensors, grads, expected = prepare(op)
    assert_same_bits(run_in_graph(lambda static: run(op, static, grads), tensors), expected)


@each_operator
def test_does_not_synchronize(op):
    tensors, grads, _ = prepare(op)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, tensors, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def big_memory():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 48 * 2**30:
        pytest.skip("needs 48 GiB of free GPU memory")
    yield
    torch.cuda.empty_cache()


each_huge = pytest.mark.parametrize(
    ("op", "layout"),
    [
        pytest.param(op, layout, id=f"{op} {layout}")
        for op in OPERATORS
        for layout in ("contiguous", "channels_last")
        if layout == "contiguous" or len(op.huge.shapes[0]) == 4
    ],
)


def last_sample(op, x, first):
    """Return a view of the last sample of `x`, where `first` is the operator's first tensor."""
    return x.narrow(op.batch_dim if x.dim() == first.dim() else 0, -1, 1)


def huge_tensors(op, layout):
    """Return activations, the first in `layout`, and parameters."""
    torch.manual_seed(0)
    first, *rest = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        for shape in op.huge.shapes
    )
    assert first.numel() > 2**31
    if op.batch_statistics:
        first.copy_(first[-1:].expand_as(first))  # a batch with the statistics of one sample
    return split(op, [lay_out(first, layout), *rest])


def call(op, data, parameters):
    return as_tuple(op.function(*join(data, parameters), **op.huge.kwargs))


@pytest.mark.usefixtures("big_memory")
@each_huge
def test_more_elements_than_32_bits_count(op, layout):
    """Compare the last sample of a huge batch with the same sample in a batch of one."""
    data, parameters = huge_tensors(op, layout)
    alone = [last_sample(op, x, data[0]).clone().requires_grad_() for x in data]
    outputs = call(op, [x.requires_grad_() for x in data], parameters)
    expected = call(op, alone, parameters)
    for y, e in zip(outputs, expected, strict=True):
        torch.testing.assert_close(last_sample(op, y, data[0]), e)
    grads = [torch.randn_like(e) for e in expected]
    huge_grads = [g.expand_as(y) for y, g in zip(outputs, grads, strict=True)]
    actual = torch.autograd.grad(outputs, data, huge_grads)
    for a, e in zip(actual, torch.autograd.grad(expected, alone, grads), strict=True):
        torch.testing.assert_close(last_sample(op, a, data[0]), e)


@pytest.mark.usefixtures("big_memory")
@each_huge
def test_parameters_of_more_elements_than_32_bits_count(op, layout):
    """Compare with the last sample's gradients; grad_output is zero for the others."""
    data, parameters = huge_tensors(op, layout)
    wanted = [x.requires_grad_() for x in present(parameters)]
    if not wanted:
        pytest.skip("has no parameters")
    outputs = call(op, data, parameters)
    grads = [torch.zeros_like(y) for y in outputs]
    for g in grads:
        last_sample(op, g, data[0]).normal_()
    actual = torch.autograd.grad(outputs, wanted, grads)
    alone = call(op, [last_sample(op, x, data[0]) for x in data], parameters)
    expected = torch.autograd.grad(alone, wanted, [last_sample(op, g, data[0]) for g in grads])
    # The sum of 2^24 random terms has standard deviation 2^12.
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=1.0)
