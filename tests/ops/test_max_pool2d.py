"""max_pool2d against F.max_pool2d, on random windows."""

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ops import MaxPool2d, max_pool2d
from tests.ops.geometries import drawn, pairs
from tests.ops.operator_entry import raw
from tests.ops.operators import each_device
from tests.ops.tensors import DTYPES, LAYOUTS, assert_accurate, double, gradients, lay_out, random

# Rows or channels are long: vector loops have a body and a tail.
images = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 11), st.integers(1, 70)) | (
    st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 6), st.integers(1, 7))
)


def assert_matches(device, image, windows, values, dtype, layout, grad_layout):
    """Compare output and gradient with F.max_pool2d in float64; windows: its other arguments."""
    x = random(image, dtype, device)
    if values != "distinct":
        x = x.round()
    if values in ("infinite", "NaN"):
        x[random(image, dtype, device, seed=1) > 0.5] = float("nan" if values == "NaN" else "-inf")
    x = lay_out(x, layout).requires_grad_()
    actual = max_pool2d(x, *windows)
    (exact,) = double([x])
    expected = F.max_pool2d(exact, *windows)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=0, equal_nan=True)
    grad = random(expected.shape, dtype, device, grad_layout, seed=2)
    (grad_input,) = gradients(actual, [x], [grad])
    (grad_exact,) = gradients(expected, [exact], [grad.double()])
    assert_accurate(grad_input, grad_exact, dtype)
    assert grad_input.is_contiguous() or grad_input.is_contiguous(memory_format=torch.channels_last)


@each_device
@drawn(300)
@given(
    image=images,
    kernel=pairs(1, 5),
    stride=pairs(1, 4),
    padding=pairs(0, 2),
    dilation=pairs(1, 3),
    ceil_mode=st.booleans(),
    values=st.sampled_from(("distinct", "equal", "infinite", "NaN")),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
)
@example((2, 3, 9, 64), (2, 2), (2, 2), (0, 0), (1, 1), False, "equal", DTYPES[1], *LAYOUTS[:2])
@example((2, 3, 9, 64), (2, 2), (2, 2), (0, 0), (1, 1), True, "equal", DTYPES[2], *LAYOUTS[:2])
@example((2, 3, 9, 65), (2, 2), (2, 2), (0, 0), (1, 1), True, "equal", DTYPES[1], *LAYOUTS[:2])
@example((2, 16, 9, 9), (3, 3), (2, 2), (1, 1), (1, 1), False, "equal", DTYPES[1], *LAYOUTS[1:3])
@example((2, 6, 28, 28), (2, 2), (3, 3), (1, 1), (1, 1), False, "NaN", DTYPES[3], *LAYOUTS[1:3])
@example((1, 2, 40, 9), (17, 3), (16, 1), (8, 1), (1, 1), False, "NaN", DTYPES[1], *LAYOUTS[:2])
@example((1, 8, 20, 9), (17, 16), (1, 1), (0, 4), (1, 1), True, "NaN", DTYPES[2], *LAYOUTS[1:3])
def test_matches_max_pool2d(
    device,
    image,
    kernel,
    stride,
    padding,
    dilation,
    ceil_mode,
    values,
    dtype,
    layout,
    grad_layout,
):
    for size, k, p, d in zip(image[2:], kernel, padding, dilation, strict=True):
        assume(p <= k // 2 and size + 2 * p >= d * (k - 1) + 1)
        assume(p == 0 or size > d * (k - 1))  # else PyTorch's gradient is out of bounds
    windows = (kernel, stride, padding, dilation, ceil_mode)
    assert_matches(device, image, windows, values, dtype, layout, grad_layout)


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("padding", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_overlapping_windows(padding, ceil_mode, dtype, device):
    """3×3 windows with stride 2, as after the first convolution of ResNet, in rows of any width."""
    windows = ((3, 3), (2, 2), padding, (1, 1), ceil_mode)
    for image in ((2, 3, 8, 40), (1, 2, 9, 36), (2, 2, 7, 34), (1, 3, 8, 33), (1, 1, 3, 3)):
        for values in ("equal", "NaN"):
            assert_matches(device, image, windows, values, dtype, *LAYOUTS[:1] * 2)


def backward_time(pool, x):
    """Return the processor time of the gradient of 2×2 windows with stride 2 and padding 1."""
    y = pool(x, 2, 2, 1)
    times = []
    for _ in range(20):
        start = time.thread_time()
        torch.autograd.grad(y, x, y, retain_graph=True)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("side", [14, 28])
def test_backward_of_short_padded_rows_is_fast(side):
    x = torch.randn(64, 8, side, side, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert backward_time(max_pool2d, x) < 2 * backward_time(F.max_pool2d, x)
    finally:
        torch.set_num_threads(threads)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (17, 3)])
def test_indices_are_bytes_and_checked(kernel, stride, layout, device):
    """Expect uint8 indices up to 16×16 windows, and zero gradients for invalid indices."""
    x = random((2, 9, 40, 40), torch.float32, device, layout)
    windows = ([kernel] * 2, [stride] * 2, [0, 0], [1, 1], False)
    output, indices = raw.max_pool2d(x, *windows)
    assert indices.dtype == (torch.uint8 if kernel < 17 else torch.int64)
    assert indices.stride() == output.stride()
    assert indices.max() < kernel**2
    channels_last = layout == "channels_last"
    for wrong in (torch.full_like(indices, 255), torch.full_like(indices, -1)):
        grad = raw.max_pool2d_backward(output, wrong, *windows, 40, 40, channels_last)
        assert grad.isfinite().all() if kernel == 17 else not grad.any()


def test_windows_of_padding_alone():
    x = torch.ones(1, 2, 3, 3, requires_grad=True)
    y = max_pool2d(x, 2, padding=1, dilation=3)  # rows and columns −1 and 2
    assert y.tolist() == [[[[1.0]]] * 2]
    x = torch.ones(1, 2, 2, 2, requires_grad=True)
    y = max_pool2d(x, 2, padding=1, dilation=3)  # −1 and 2
    assert y.tolist() == [[[[float("-inf")]]] * 2]
    y.sum().backward()
    assert not x.grad.any()


def test_window_far_larger_than_the_image():
    assert max_pool2d(torch.ones(1, 1, 2, 2), 30_000, padding=15_000).tolist() == [[[[1.0]]]]


def test_vectorized_forward_mode():
    x = random((1, 2, 5, 6), torch.float64, "cpu")
    jacobian = torch.autograd.functional.jacobian
    forward = jacobian(lambda x: max_pool2d(x, 2), x, vectorize=True, strategy="forward-mode")
    assert torch.equal(forward, jacobian(lambda x: max_pool2d(x, 2), x))


def test_bool_of_numpy_is_named():
    with pytest.raises(TypeError, match=r"ceil_mode must be bool, not (numpy\.bool|bool_)$"):
        max_pool2d(torch.ones(1, 1, 4, 4), 2, ceil_mode=np.bool_(True))


@pytest.mark.parametrize("stride", [[], (), torch.Size([])], ids=repr)
def test_empty_stride_is_the_kernel_size(stride):
    x = random((1, 2, 7, 6), torch.float64, "cpu")
    expected = F.max_pool2d(x, (3, 2), stride)
    assert torch.equal(max_pool2d(x, (3, 2), stride), expected)
    assert torch.equal(MaxPool2d((3, 2), stride)(x), expected)
    compiled = torch.compile(max_pool2d, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, (3, 2), stride), expected)
