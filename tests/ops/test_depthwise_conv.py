"""depthwise_conv2d against F.conv2d(groups=C), over whatever geometry Hypothesis comes up with."""

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
def test_matches_conv2d(
    device, image, kernel, stride, padding, dilation, bias, dtype, layout, grad_layout
):
    for size, k, p, d in zip(image[2:], kernel, padding, dilation, strict=True):
        assume(size + 2 * p >= d * (k - 1) + 1)
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
    actual = depthwise_conv2d(*tensors, stride, padding, dilation)
    expected = F.conv2d(*exact, stride, padding, dilation, groups=channels)
    assert_accurate(actual, expected, dtype)
    grad = random(expected.shape, dtype, device, grad_layout, seed=4)
    for a, e in zip(
        gradients(actual, tensors, [grad]), gradients(expected, exact, double([grad])), strict=True
    ):
        assert_accurate(a, e, dtype, terms=grad.numel() / a.numel())
