"""CUDA families of depthwise convolution: dispatch, accuracy, streams, graphs and limits."""

import pytest
import torch
import torch.nn.functional as F

from ops import depthwise_conv2d
from tests.ops.cuda_runs import assert_same_bits, run_in_graph, run_on_side_stream
from tests.ops.tensors import random

pytestmark = pytest.mark.cuda


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


@pytest.mark.parametrize("size", [(24, 24), (20, 20), (9, 30), (33, 41)], ids=str)
@pytest.mark.parametrize("kernel", [5, 7])
def test_bands_of_matrix_products(kernel, size):
    """Bands of nhwc_mma have the rows that cover the image with the least work."""
    image = (32, 136, *size)
    case = (image, kernel, 1, kernel // 2, 1, torch.float16, "channels_last")
    tensors, geometry, grad = make_case(case)
    pairs = [[value] * 2 for value in geometry]
    query = torch.ops.lenet_ops.depthwise_conv2d_kernel
    assert query(*tensors[:2], *pairs, "forward") == "nhwc_mma"
    assert_accurate(tensors, geometry, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_images_of_one_thread(kernel, layout, dtype):
    """A thread computes all outputs of a 7x7 image of one channel."""
    assert_accurate(*make_case(((37, 70, 7, 7), kernel, 1, kernel // 2, 1, dtype, layout)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [(8, 3, 1), (16, 5, 1), (40, 5, 2), (24, 7, 1), (32, 3, 2)]
)
def test_even_widths(size, kernel, stride, dtype):
    """Input gradients with stride 2 store pairs of 16-bit outputs."""
    case = ((13, 30, size, size), kernel, stride, kernel // 2, 1, dtype, "contiguous")
    assert_accurate(*make_case(case))


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


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kernel", [3, 6, 7])
def test_more_channels_than_a_grid_has_rows(kernel, layout):
    """Tuned families run 70,000 channels, large filters run in direct_l1_runtime."""
    case = ((2, 70_000, 7, 7), kernel, 1, kernel // 2, 1, torch.float32, layout)
    tensors, geometry, grad = make_case(case)
    query = torch.ops.lenet_ops.depthwise_conv2d_kernel
    pairs = [[value] * 2 for value in geometry]
    families = {query(*tensors[:2], *pairs, p) for p in ("forward", "weight_gradient")}
    assert (families == {"direct_l1_runtime"}) == (kernel == 6)
    assert_accurate(tensors, geometry, grad)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_images_of_more_tiles_than_a_grid_has_layers(layout):
    assert_accurate(*make_case(((1, 8, 2100, 2100), 3, 1, 1, 1, torch.float32, layout)))


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


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_sizes_beyond_32_bits(layout):
    """Only the centre tap reaches the image: output and gradients are products with it."""
    far = 2**28  # padded sizes of 2^29: 64-bit indices
    x = random((2, 3, 4, 5), torch.float64, "cuda", layout, seed=0).requires_grad_()
    weight = random((3, 1, 3, 3), torch.float64, "cuda", seed=1).requires_grad_()
    grad = random((2, 3, 4, 5), torch.float64, "cuda", layout, seed=2)
    output = depthwise_conv2d(x, weight, None, padding=far, dilation=far)
    centre = weight[:, :, 1, 1].view(3, 1, 1)
    torch.testing.assert_close(output, x * centre)
    grad_x, grad_weight = torch.autograd.grad(output, (x, weight), grad)
    torch.testing.assert_close(grad_x, grad * centre)
    expected = torch.zeros_like(weight)
    expected[:, 0, 1, 1] = (grad * x).sum((0, 2, 3))
    torch.testing.assert_close(grad_weight, expected)


def test_filters_beyond_shared_memory():
    """Channels-last filters of 79x79 taps in float64 exceed 48 KB."""
    x = random((1, 2, 80, 80), torch.float64, "cuda", "channels_last", seed=0).requires_grad_()
    weight = random((2, 1, 79, 79), torch.float64, "cuda", seed=1).requires_grad_()
    actual = depthwise_conv2d(x, weight, None, padding=39)
    expected = F.conv2d(x, weight, None, padding=39, groups=2)
    torch.testing.assert_close(actual, expected)
    grads = (torch.autograd.grad(y, (x, weight), torch.ones_like(y)) for y in (actual, expected))
    torch.testing.assert_close(*grads)
