"""depthwise_conv2d against F.conv2d(groups=C), over whatever geometry Hypothesis comes up with."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ops import depthwise_conv2d
from tests.ops.operators import each_device
from tests.ops.tensors import DTYPES, LAYOUTS, assert_accurate, double, gradients, random


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


# Small in some dimensions, wide in others: vector loops have a body and a rest.
images = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 11), st.integers(1, 40)) | (
    st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 6), st.integers(1, 7))
)


@each_device
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
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
# a block takes, not a multiple of what it takes.
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("channels", [36, 130])
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
def test_every_filter(device, kernel, stride, padding, dilation, channels, layout, dtype):
    geometry = ((stride,) * 2, (padding,) * 2, (dilation,) * 2)
    image = (3, channels, 15, 18)
    compare(device, image, (kernel, kernel), geometry, True, dtype, layout, layout)


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
