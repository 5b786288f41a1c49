"""CUDA streams, devices, graphs, tensors of more than 2³¹ elements, and depthwise families."""

import pytest
import torch

from ops import depthwise_conv2d
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


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.to(e.device), e)


def run_on_side_stream(function, tensors):
    """Run `function` on a stream that writes its inputs late; any other stream reads NaN."""
    late = [torch.full_like(x, torch.nan).requires_grad_() for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
        with torch.no_grad():
            for x, value in zip(late, tensors, strict=True):
                x.copy_(value)
        results = function(late)
    stream.synchronize()
    return results


def run_in_graph(function, tensors):
    """Capture `function` with zeros, replay it with `tensors`, and return the results."""
    static = [torch.zeros_like(x).requires_grad_() for x in tensors]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # allocations and lazy loading happen before the capture
        for _ in range(2):
            function(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(static)
    with torch.no_grad():
        for x, value in zip(static, tensors, strict=True):
            x.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    return results


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


# For each kernel family a depthwise convolution that it runs: input shape, kernel, stride, padding,
# dilation, dtype, layout.
FAMILIES = {
    "direct_l1": ((2, 8, 14, 14), 3, 1, 1, 1, torch.float32, "contiguous"),
    "direct_l1_runtime": ((4, 24, 41, 40), 3, 3, 4, 4, torch.float16, "channels_last"),
    "large_filter": ((32, 64, 14, 14), 31, 1, 15, 1, torch.float32, "contiguous"),
    "nchw_fma": ((64, 96, 56, 57), 3, 1, 1, 1, torch.float32, "contiguous"),
    "nchw_mma": ((64, 96, 56, 56), 7, 1, 3, 1, torch.bfloat16, "contiguous"),
    "nhwc_mma": ((64, 96, 56, 56), 7, 1, 3, 1, torch.bfloat16, "channels_last"),
    "nhwc_ring": ((64, 96, 56, 57), 3, 1, 1, 1, torch.float32, "channels_last"),
}
each_family = pytest.mark.parametrize("family", FAMILIES)
RING_GEOMETRIES = [(3, 1, 1), (3, 1, 2), (3, 2, 1), (5, 1, 1), (5, 2, 1), (7, 1, 1), (7, 2, 1)]


def depthwise_case(family, device="cuda"):
    return make_case(FAMILIES[family], device)


def make_case(case, device="cuda"):
    """Return input, weight and bias, the geometry, and the gradient of the output."""
    image, kernel, *geometry, dtype, layout = case
    tensors = [
        random(image, dtype, device, layout, seed=1).requires_grad_(),
        random((image[1], 1, kernel, kernel), dtype, device, seed=2).requires_grad_(),
        random((image[1],), dtype, device, seed=3).requires_grad_(),
    ]
    with torch.no_grad():
        grad = random(depthwise_conv2d(*tensors, *geometry).shape, dtype, device, layout, seed=4)
    return tensors, geometry, grad


def run_depthwise(tensors, geometry, grad):
    """Return the output, all gradients, and those of the input and of the parameters alone."""
    output = depthwise_conv2d(*tensors, *geometry)
    results = [output]
    for wanted in (tensors, tensors[:1], tensors[1:]):
        results += torch.autograd.grad(output, wanted, grad, retain_graph=True)
    return results


def assert_accurate(tensors, geometry, grad):
    """Compare the output and all gradients with PyTorch's in float64."""
    actual = run_depthwise(tensors, geometry, grad)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    reference = torch.nn.functional.conv2d(*exact, *geometry, groups=tensors[0].shape[1])
    gradients = torch.autograd.grad(reference, exact, grad.double())
    expected = [reference, *gradients, *gradients]
    for a, e in zip(actual, expected, strict=True):
        error = (a.double() - e).norm() / e.norm()
        assert error < (1e-5 if grad.dtype is torch.float32 else 1e-2)


@each_family
@pytest.mark.parametrize(
    "kernel_pass", ["forward", "input_gradient", "weight_gradient", "all_gradients"]
)
def test_family_runs(family, kernel_pass):
    """The dispatch selects the family that the case is named after."""
    (x, weight, _), geometry, _ = depthwise_case(family)
    pairs = [[value] * 2 for value in geometry]
    query = torch.ops.lenet_ops.depthwise_conv2d_kernel
    expected = family
    if (family, kernel_pass) == ("nhwc_mma", "weight_gradient"):
        expected = "nhwc_ring"
    elif kernel_pass == "all_gradients":
        expected = family if family == "nhwc_ring" else "separate"
    assert query(x, weight, *pairs, kernel_pass) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [66, 67, 72], ids=["4-byte copies", "odd", "16-byte copies"])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), RING_GEOMETRIES)
def test_ring_over_several_images(kernel, stride, dilation, channels, dtype):
    """Blocks of nhwc_ring begin and end within images of odd sizes."""
    padding = dilation * (kernel // 2)
    case = ((96, channels, 45, 23), kernel, stride, padding, dilation, dtype, "channels_last")
    assert_accurate(*make_case(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "stride", "width"), [(3, 1, 1333), (5, 1, 1024), (3, 2, 1333)])
def test_wide_images_run_in_bands_of_one_tile(kernel, stride, width, dtype):
    case = ((4, 32, 90, width), kernel, stride, kernel // 2, 1, dtype, "contiguous")
    tensors, geometry, grad = make_case(case)
    query = torch.ops.lenet_ops.depthwise_conv2d_kernel
    pairs = [[value] * 2 for value in geometry]
    for kernel_pass in ("forward", "input_gradient", "weight_gradient"):
        assert query(*tensors[:2], *pairs, kernel_pass) == "nchw_fma"
    assert_accurate(tensors, geometry, grad)


def test_odd_channels_of_7x7_filters_run_in_the_ring():
    (x, weight, _), _, _ = make_case(((64, 97, 28, 28), 7, 1, 3, 1, torch.float32, "channels_last"))
    query = torch.ops.lenet_ops.depthwise_conv2d_kernel
    assert query(x, weight, [1, 1], [3, 3], [1, 1], "forward") == "nhwc_ring"


@each_family
def test_family_is_deterministic(family):
    case = depthwise_case(family)
    expected = run_depthwise(*case)
    for _ in range(3):
        assert_same_bits(run_depthwise(*case), expected)


@each_family
def test_family_runs_on_the_current_stream(family):
    tensors, geometry, grad = depthwise_case(family)
    expected = run_depthwise(tensors, geometry, grad)
    actual = run_on_side_stream(lambda late: run_depthwise(late, geometry, grad), tensors)
    assert_same_bits(actual, expected)


@each_family
def test_family_runs_on_the_device_of_its_tensors(family):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    expected = run_depthwise(*depthwise_case(family))
    assert_same_bits(run_depthwise(*depthwise_case(family, "cuda:1")), expected)
    assert torch.cuda.current_device() == 0


@each_family
def test_family_in_a_cuda_graph(family):
    tensors, geometry, grad = depthwise_case(family)
    expected = run_depthwise(tensors, geometry, grad)
    actual = run_in_graph(lambda static: run_depthwise(static, geometry, grad), tensors)
    assert_same_bits(actual, expected)


@each_family
def test_family_reads_within_bounds(family):
    """Surround the tensors by NaN."""
    tensors, geometry, grad = depthwise_case(family)
    expected = run_depthwise(tensors, geometry, grad)

    def surround(x):
        rim = 1 << 16
        memory = x.new_full((x.numel() + 2 * rim,), torch.nan)
        inner = memory[rim:-rim].as_strided(x.shape, x.stride(), rim)
        return inner.copy_(x.detach())

    inside = [surround(x).requires_grad_() for x in tensors]
    assert_same_bits(run_depthwise(inside, geometry, surround(grad)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_filter_of_more_taps_than_a_grid_has_rows(dtype):
    """Run 65,536 taps; gridDim.y is at most 65,535."""
    x = random((1, 1, 256, 256), dtype, "cuda", seed=1)
    weight = random((1, 1, 256, 256), dtype, "cuda", seed=2).requires_grad_()
    output = depthwise_conv2d(x, weight)
    exact = (x.double() * weight.double()).sum().detach()
    torch.testing.assert_close(output.detach().squeeze().double(), exact, rtol=1e-4, atol=1e-3)
    (grad,) = torch.autograd.grad(output.sum(), weight)
    assert torch.equal(grad, x)


def test_nan_gradient_is_not_slow():
    """Compare the time of NaN gradients, as from a float16 overflow, with that of finite ones."""
    x = random((16, 64, 128, 128), torch.float16, "cuda", seed=1)
    weight = random((64, 1, 3, 3), torch.float16, "cuda", seed=2).requires_grad_()
    output = depthwise_conv2d(x, weight, None, 1, 1)

    def milliseconds(grad):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            torch.autograd.grad(output, weight, grad, retain_graph=True)
        start.record()
        for _ in range(10):
            torch.autograd.grad(output, weight, grad, retain_graph=True)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    assert milliseconds(torch.full_like(output, torch.nan)) < 5 * milliseconds(output.detach())
