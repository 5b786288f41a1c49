"""depthwise_conv2d against F.conv2d(groups=C), on random and on chosen geometries."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ops import depthwise_conv2d
from tests.ops.geometries import drawn, pairs
from tests.ops.operators import each_device
from tests.ops.tensors import (
    DTYPES,
    LAYOUTS,
    assert_accurate,
    double,
    gradients,
    lay_out,
    random,
)

# Rows or channels are long: vector loops have a body and a tail.
images = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 11), st.integers(1, 40)) | (
    st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 6), st.integers(1, 7))
)

SMALL = 40_000  # elements per multiprocessor: the largest kSmall… in cuda/dispatch.cu


@each_device
@drawn(300)
@given(
    image=images,
    kernel=pairs(1, 5) | pairs(6, 9),
    stride=pairs(1, 3),
    padding=pairs(0, 3) | pairs(4, 11),
    dilation=pairs(1, 3),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
)
@example((2, 8, 12, 40), (3, 3), (1, 1), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
@example((2, 8, 12, 40), (5, 5), (2, 2), (2, 2), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
@example((2, 64, 6, 7), (3, 3), (1, 1), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[1:2] * 2)
@example((2, 1, 28, 28), (5, 5), (1, 1), (2, 2), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
@example((7, 3, 5, 9), (3, 3), (1, 1), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
@example((7, 3, 5, 9), (3, 3), (1, 1), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[1:2] * 2)
@example((1, 2, 3, 300), (3, 3), (1, 1), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
@example((1, 1, 50, 9), (3, 3), (2, 1), (4, 1), (2, 1), True, torch.float32, *LAYOUTS[:1] * 2)
@example((1, 2, 50, 9), (5, 1), (3, 1), (0, 0), (2, 1), True, torch.float32, *LAYOUTS[1:2] * 2)
@example((2, 32, 9, 8), (3, 3), (2, 2), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[1:2] * 2)
@example((1, 33, 9, 9), (3, 3), (2, 2), (1, 1), (1, 1), True, torch.float32, *LAYOUTS[1:2] * 2)
@example((1, 9, 5, 7), (2, 2), (9, 40), (30, 100), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
def test_matches_conv2d(
    device, image, kernel, stride, padding, dilation, bias, dtype, layout, grad_layout
):
    for size, k, p, d in zip(image[2:], kernel, padding, dilation, strict=True):
        assume(size + 2 * p >= d * (k - 1) + 1)
    compare(device, image, kernel, (stride, padding, dilation), bias, dtype, layout, grad_layout)


# All filters with a specialised kernel on some device, and some without. Channel counts beyond a
# block, no multiple of a block or a vector. Images with one column tile and with several.
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(("channels", "width"), [(36, 30), (37, 18), (130, 18)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        *((k, s, p, 1) for k in (3, 5, 7) for s in (1, 2) for p in (k // 2, k // 2 + 1)),
        (3, 1, 2, 2),
        (9, 1, 4, 1),
        (31, 1, 15, 1),
        (4, 3, 2, 1),
    ],
)
def test_every_filter(device, kernel, stride, padding, dilation, channels, width, layout, dtype):
    geometry = ((stride,) * 2, (padding,) * 2, (dilation,) * 2)
    image = (3, channels, 15, width)
    compare(device, image, (kernel, kernel), geometry, True, dtype, layout, layout)


# 512 channels map pixels to few cache sets; others are no multiple of a vector. Rows fit into one
# block, or do not.
@each_device
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(
    ("channels", "width"), [(512, 30), (20, 13), (20, 14), (130, 14), (37, 61), (64, 60)]
)
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (3, 1, 2), (5, 1, 1), (7, 1, 1)]
)
def test_channels_and_row_lengths(device, kernel, stride, dilation, channels, width, layout):
    geometry = ((stride,) * 2, (kernel // 2 * dilation,) * 2, (dilation,) * 2)
    image = (1, channels, 9, width)
    compare(device, image, (kernel, kernel), geometry, True, torch.float32, layout, layout)


# More blocks than are resident; feature maps split into bands; rows too long for bands.
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize("image", [(300, 40, 7, 7), (2, 3, 130, 225), (1, 2, 9, 1900)], ids=str)
def test_many_small_and_few_large_maps(device, image, kernel, layout, dtype):
    geometry = ((1, 1), (kernel // 2,) * 2, (1, 1))
    compare(device, image, (kernel, kernel), geometry, True, dtype, layout, layout)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_misaligned_storage(device, dtype, kernel):
    weight = random((8, 1, kernel, kernel), dtype, device, seed=2)
    for n in batch_sizes(device, dtype, 3, 8 * 9 * 16):
        flat = random((n * 8 * 9 * 16 + 1,), dtype, device, seed=1)[1:]
        for x in (flat.view(n, 8, 9, 16), flat.view(n, 9, 16, 8).permute(0, 3, 1, 2)):
            exact = F.conv2d(x.double(), weight.double(), None, 1, kernel // 2, groups=8)
            assert_accurate(depthwise_conv2d(x, weight, None, 1, kernel // 2), exact, dtype)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_views_of_channels(device, dtype, layout):
    """Compare views that select, permute or repeat channels; the CPU kernels do not copy them."""
    image = random((3, 40, 9, 11), dtype, device, layout, seed=1)
    weight = random((20, 1, 3, 3), dtype, device, seed=2).requires_grad_()
    for x in (
        image[:, 20:],
        image[:, 1::2],
        image[1:, :1].expand(-1, 20, -1, -1),
        image[:1, 5:25].expand(7, -1, -1, -1),
        image.transpose(0, 1)[:20, :2].transpose(0, 1),
        image.transpose(2, 3)[:, :20],
    ):
        exact = weight.detach().double().requires_grad_()
        actual, expected = depthwise_conv2d(x, weight), F.conv2d(x.double(), exact, groups=20)
        assert_accurate(actual, expected, dtype)
        grad = random(expected.shape, dtype, device, layout, seed=4)
        (actual,) = torch.autograd.grad(actual, weight, grad)
        (expected,) = torch.autograd.grad(expected, exact, grad.double())
        assert_accurate(actual, expected, dtype, terms=grad.numel() / actual.numel())


@each_device
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize(
    ("channels", "height", "width"),
    [(5, 9, 10), (8, 9, 10), (8, 16, 20), (8, 9, 56), (5, 19, 208)],
)
def test_padding_is_not_multiplied_by_infinity(
    device, channels, height, width, kernel, layout, dtype
):
    for n in batch_sizes(device, dtype, 2, channels * height * width):
        x = random((n, channels, height, width), dtype, device, layout, seed=1)
        x[0, 1, -1, -1] = torch.inf
        x[0, 1, 0, 0] = torch.inf
        x[1, 2, 0, 4] = -torch.inf
        weight = random((channels, 1, kernel, kernel), dtype, device, seed=2).requires_grad_()
        exact = weight.detach().double().requires_grad_()
        geometry = (None, 1, kernel // 2)
        actual = depthwise_conv2d(x, weight, *geometry)
        expected = F.conv2d(x.double(), exact, *geometry, groups=channels)
        assert torch.equal(actual.isinf(), expected.isinf())
        grad = random(expected.shape, dtype, device, layout, seed=4)
        (actual,) = torch.autograd.grad(actual, weight, grad)
        (expected,) = torch.autograd.grad(expected, exact, grad.double())
        # In channels 1 and 2 any tap may be NaN: 0 · ∞ where a kernel loads zeros for padding.
        right = (actual.isinf() == expected.isinf()) & (actual.isnan() == expected.isnan())
        assert torch.all(right | actual.isnan())
        finite = [c for c in range(channels) if c not in (1, 2)]
        assert actual[finite].isfinite().all()


# Every number of matrix products in a row; feature maps that are more than a block and no multiple
# of it; rows of several tiles, and bands.
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 37])
@pytest.mark.parametrize("padding", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(
    ("kernel", "height", "width"),
    [
        *((3, 19, 16), (5, 19, 16), (7, 19, 8), (7, 19, 14), (7, 19, 26), (7, 19, 58)),
        *((7, 19, 208), (7, 75, 58)),
    ],
)
def test_nchw_mma(kernel, height, width, padding, channels, dtype):
    geometry = ((1, 1), (padding,) * 2, (1, 1))
    image = (3, channels, height, width)
    compare("cuda", image, (kernel, kernel), geometry, True, dtype, *LAYOUTS[:1] * 2)


# Tiles of 16 columns and fewer, also of 8 and fewer; bands of 14 rows and fewer; channels that are
# no multiple of a block; wide images in numbers from which nhwc_mma runs.
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [16, 40])
@pytest.mark.parametrize("padding", [0, 1, 2, 3, 6, 8])
@pytest.mark.parametrize(
    ("kernel", "height", "width"),
    [
        *((5, 14, 14), (5, 9, 25), (5, 35, 50), (5, 20, 20), (7, 7, 7), (7, 19, 13), (7, 14, 14)),
        *((7, 40, 28), (7, 7, 40), (7, 56, 56), (7, 50, 49), (7, 75, 33), (5, 16, 113), (5, 30, 5)),
    ],
)
def test_nhwc_mma(kernel, height, width, padding, channels, dtype):
    geometry = ((1, 1), (padding,) * 2, (1, 1))
    image = (5 if width <= 16 else 80, channels, height, width)
    compare("cuda", image, (kernel, kernel), geometry, True, dtype, *LAYOUTS[1:2] * 2)


# Two images that fill a GPU: split into many parts.
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("channels", [40, 41])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"),
    [*((k, s, 1) for k in (3, 5, 7) for s in (1, 2)), (3, 1, 2)],
)
def test_large_images(kernel, stride, dilation, channels, layout, dtype):
    geometry = ((stride,) * 2, (kernel // 2,) * 2, (dilation,) * 2)
    image = (2, channels, 301, 250)
    compare("cuda", image, (kernel, kernel), geometry, True, dtype, layout, layout)


def batch_sizes(device, dtype, images, elements):
    """Return `images` and, on CUDA, the batch size from which the kernels for large inputs run."""
    if device == "cpu":
        return [images]
    filling = SMALL * torch.cuda.get_device_properties(device).multi_processor_count + 1
    return sorted({images, max(images, math.ceil(filling / elements))})


def compare(device, image, kernel, geometry, bias, dtype, layout, grad_layout):
    out = F.conv2d(
        torch.empty(image, device="meta"),
        torch.empty(image[1], 1, *kernel, device="meta"),
        None,
        *geometry,
        groups=image[1],
    )
    each = math.prod(image[1:]) + math.prod(out.shape[1:])
    for n in batch_sizes(device, dtype, image[0], each):
        images = (n, *image[1:])
        compare_batch(device, images, kernel, geometry, bias, dtype, layout, grad_layout)


def compare_batch(device, image, kernel, geometry, bias, dtype, layout, grad_layout):
    channels = image[1]
    tensors = [
        random_batch(image, dtype, device, layout, seed=1),
        random((channels, 1, *kernel), dtype, device, layout, seed=2),
        random((channels,), dtype, device, layout, seed=3) if bias else None,
    ]
    for x in tensors:
        if x is not None:
            x.requires_grad_()
    exact = double(tensors)
    actual = depthwise_conv2d(*tensors, *geometry)
    expected = F.conv2d(*exact, *geometry, groups=channels)
    assert_accurate(actual, expected, dtype)
    grad = random_batch(expected.shape, dtype, device, grad_layout, seed=4)
    of_input, *of_parameters = gradients(expected, exact, double([grad]))
    requests = [(tensors, [of_input, *of_parameters])]
    if device == "cuda":  # other kernels may run for one gradient alone
        requests += [(tensors[:1], [of_input]), (tensors[1:], of_parameters)]
    for wanted, exact_gradients in requests:
        actual = depthwise_conv2d(*tensors, *geometry)
        for a, e in zip(gradients(actual, wanted, [grad]), exact_gradients, strict=True):
            assert_accurate(a, e, dtype, terms=grad.numel() / a.numel())


def random_batch(shape, dtype, device, layout, seed):
    """Draw images; from the ninth on, scaled copies of the first eight, to save time."""
    images = random((min(8, shape[0]), *shape[1:]), dtype, device, layout, seed)
    if len(images) == shape[0]:
        return images
    scale = random((shape[0], 1, 1, 1), dtype, device, seed=seed + 10)
    copies = images.repeat(math.ceil(shape[0] / len(images)), 1, 1, 1)[: shape[0]]
    return lay_out(copies * scale, layout)


@each_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("of_input", [False, True], ids=["parameters", "all"])
def test_gradients_sum_four_million_terms_accurately(of_input, layout, device):
    channels = 2 if device == "cpu" else 8
    shape = (16, channels, 512, 512)
    x, grad = (lay_out(random(shape, torch.float32, device, seed=i).abs(), layout) for i in (0, 1))
    geometry = ([1, 1], [1, 1], [1, 1])
    weight = torch.zeros(channels, 1, 3, 3, device=device)
    _, of_weight, of_bias = torch.ops.lenet_ops.depthwise_conv2d_backward(
        grad, x, weight, *geometry, [of_input, True, True]
    )
    exact = torch.stack(((x.double() * grad.double()).sum((0, 2, 3)), grad.double().sum((0, 2, 3))))
    actual = torch.stack((of_weight[:, 0, 1, 1], of_bias)).double()
    limit = torch.finfo(torch.float32).eps * (1 if device == "cpu" else 16)
    assert (actual / exact - 1).abs().max() < limit


def passes(channels):
    """Yield calls of forward, input gradient and weight gradient."""
    x = torch.ones(1, channels, 128, 128, requires_grad=True)
    weight = torch.ones(channels, 1, 5, 5, requires_grad=True)
    y = depthwise_conv2d(x, weight, None, padding=2)
    grad = torch.ones_like(y)
    yield lambda: depthwise_conv2d(x, weight, None, padding=2)
    yield lambda: torch.autograd.grad(y, x, grad, retain_graph=True)
    yield lambda: torch.autograd.grad(y, weight, grad, retain_graph=True)


def processor_time(function):
    start = time.thread_time()
    function()
    return time.thread_time() - start


def test_few_feature_maps_fill_vectors():
    """Expect one feature map to take less time than four, as vectors run along its rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for one, four in zip(passes(1), passes(4), strict=True):
            times = [(processor_time(four), processor_time(one)) for _ in range(100)]
            assert min(t[0] for t in times) > 1.5 * min(t[1] for t in times)
    finally:
        torch.set_num_threads(threads)
