"""What only a GPU can get wrong: streams, devices, graphs, more elements than 32 bits can count."""

import pytest
import torch

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


def run(op, case, tensors, grads):
    """Returns outputs and gradients."""
    outputs = as_tuple(op.function(*tensors, **case.kwargs))
    return [*outputs, *gradients(outputs, tensors, grads)]


def prepare(op, device="cuda"):
    """Returns the typical inputs, gradients for their outputs, and the results to expect."""
    tensors = inputs(op.cases[0], torch.float32, device, requires_grad=True)
    outputs = as_tuple(op.function(*tensors, **op.cases[0].kwargs))
    grads = [random(y.shape, y.dtype, device, seed=9) for y in outputs]
    return tensors, grads, run(op, op.cases[0], tensors, grads)


@each_operator
def test_runs_on_the_current_stream(op):
    """The input arrives on a side stream, late: kernels on any other stream would miss it."""
    tensors, grads, expected = prepare(op)
    late = [torch.full_like(x, torch.nan).requires_grad_() for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
        with torch.no_grad():
            for x, value in zip(late, tensors, strict=True):
                x.copy_(value)
        actual = run(op, op.cases[0], late, grads)
    stream.synchronize()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@each_operator
def test_other_device(op):
    """The tensors' device counts, not the current one, and that one stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, _, expected = prepare(op)
    torch.cuda.set_device(0)
    _, _, actual = prepare(op, "cuda:1")
    assert torch.cuda.current_device() == 0
    for a, e in zip(actual, expected, strict=True):
        assert a.get_device() == 1
        assert torch.equal(a.to("cuda:0"), e)


@each_operator
def test_tensors_on_different_devices(op):
    tensors = inputs(op.cases[0], torch.float32, "cuda", requires_grad=True)
    for call in record(op, op.cases[0], *tensors):
        positions = [i for i, x in enumerate(call.args) if isinstance(x, torch.Tensor)]
        for i in positions[1:]:
            args = [*call.args[:i], call.args[i].detach().cpu(), *call.args[i + 1 :]]
            with pytest.raises(RuntimeError, match="device"):
                call.op(*args)


@each_operator
def test_cuda_graph(op):
    """Captured once, forward and backward, replayed on other values."""
    tensors, grads, expected = prepare(op)
    static = [torch.zeros_like(x).requires_grad_() for x in tensors]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # allocations and lazy loading happen before the capture
        for _ in range(2):
            run(op, op.cases[0], static, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(op, op.cases[0], static, grads)
    with torch.no_grad():
        for x, value in zip(static, tensors, strict=True):
            x.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@each_operator
def test_does_not_wait_for_the_gpu(op):
    """No hidden synchronisation: the host runs ahead."""
    tensors, grads, _ = prepare(op)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, op.cases[0], tensors, grads)
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
    """A view of the last sample of a tensor, beside the first one."""
    return x.narrow(op.samples if x.dim() == first.dim() else 0, -1, 1)


def huge_tensors(op, layout):
    """Returns what has samples, the first of it in `layout`, and the parameters."""
    torch.manual_seed(0)
    first, *rest = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        for shape in op.huge.shapes
    )
    assert first.numel() > 2**31
    return split(op, [lay_out(first, layout), *rest])


def call(op, data, parameters):
    return as_tuple(op.function(*join(data, parameters), **op.huge.kwargs))


@pytest.mark.usefixtures("big_memory")
@each_huge
def test_more_elements_than_32_bits_count(op, layout):
    """The last sample of a huge batch comes out as it does alone."""
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
    """Samples whose gradient is zero leave the parameters' gradients alone."""
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
    # 2^24 random terms sum up to about 2^12
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=1.0)


def test_cuda_kernels_are_registered():
    """A CPU-only build on a machine with a GPU is noticed here, not by slow models."""
    for op in OPERATORS:
        for name in op.names:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lenet_ops::{name}", "CUDA")
