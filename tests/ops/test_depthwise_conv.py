"""depthwise_conv2d against F.conv2d(groups=C), over whatever geometry Hypothesis comes up with."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ops import depthwise_conv2d
from tests.ops.geometries import drawn, pairs
from tests.ops.operators import each_device
from tests.ops.tensors import DTYPES, LAYOUTS, assert_accurate, double, gradients, random

# Small in some dimensions, wide in others: vector loops have a body and a rest.
images = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 11), st.integers(1, 40)) | (
    st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 6), st.integers(1, 7))
)


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
@example((1, 9, 5, 7), (2, 2), (9, 40), (30, 100), (1, 1), True, torch.float32, *LAYOUTS[:1] * 2)
def test_matches_conv2d(
    device, image, kernel, stride, padding, dilation, bias, dtype, layout, grad_layout
):
    for size, k, p, d in zip(image[2:], kernel, padding, dilation, strict=True):
        assume(size + 2 * p >= d * (k - 1) + 1)
    compare(device, image, kernel, (stride, padding, dilation), bias, dtype, layout, grad_layout)


# Every filter that has a kernel of its own on some device, and some that do not; more channels than
# a block takes, and not multiples of what it takes or what a vector holds; images of more strips
# and of fewer.
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


# More work than runs at a time, planes that are cut into bands, and rows too long for that.
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize("image", [(300, 40, 7, 7), (2, 3, 130, 225), (1, 2, 9, 1900)], ids=str)
def test_every_cut(device, image, kernel, layout, dtype):
    geometry = ((1, 1), (kernel // 2,) * 2, (1, 1))
    compare(device, image, (kernel, kernel), geometry, True, dtype, layout, layout)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [3, 5])
def test_storage_that_is_not_aligned(device, dtype, kernel):
    """An image that begins between the addresses that vectors are loaded from."""
    image, padding = (3, 8, 9, 16), kernel // 2
    weight = random((8, 1, kernel, kernel), dtype, device, seed=2)
    flat = random((3 * 8 * 9 * 16 + 1,), dtype, device, seed=1)
    x = flat[1:].view(image)
    for layout in (x, flat[1:].view(3, 9, 16, 8).permute(0, 3, 1, 2)):
        copy = layout.clone()
        assert layout.stride() == copy.stride()
        assert torch.equal(
            depthwise_conv2d(layout, weight, None, 1, padding),
            depthwise_conv2d(copy, weight, None, 1, padding),
        )


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_some_channels_of_an_image(device, dtype, layout):
    """Channels that are left out, in another order or repeated: on the CPU they are not copied."""
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_infinity_beside_the_edge(device, kernel, layout, dtype):
    """What lies beyond an edge counts as nothing, also where the other factor is infinite."""
    x = random((2, 5, 9, 10), dtype, device, layout, seed=1)
    x[0, 1, -1, -1] = torch.inf
    x[1, 2, 0, 4] = -torch.inf
    weight = random((5, 1, kernel, kernel), dtype, device, seed=2).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    geometry = (None, 1, kernel // 2)
    actual = depthwise_conv2d(x, weight, *geometry)
    expected = F.conv2d(x.double(), exact, *geometry, groups=5)
    assert torch.equal(actual.isinf(), expected.isinf())
    grad = random(expected.shape, dtype, device, layout, seed=4)
    (actual,) = torch.autograd.grad(actual, weight, grad)
    (expected,) = torch.autograd.grad(expected, exact, grad.double())
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())


def compare(device, image, kernel, geometry, bias, dtype, layout, grad_layout):
    channels = image[1]
    tensors = [
        random(image, dtype, device, layout, seed=1),
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
    grad = random(expected.shape, dtype, device, grad_layout, seed=4)
    for a, e in zip(
        gradients(actual, tensors, [grad]), gradients(expected, exact, double([grad])), strict=True
    ):
        assert_accurate(a, e, dtype, terms=grad.numel() / a.numel())
