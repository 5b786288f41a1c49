"""max_pool2d against F.max_pool2d, on random windows."""

import time
from itertools import product

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
    x = torch.randn(512, 8, side, side, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert backward_time(max_pool2d, x) < 2.5 * backward_time(F.max_pool2d, x)
    finally:
        torch.set_num_threads(threads)


def allocated_bytes(function, device):
    """Return the bytes that a call allocates, also those that it frees at once."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


@each_device
@pytest.mark.parametrize(("mode", "bytes_per_output"), [(torch.no_grad, 4), (torch.enable_grad, 5)])
def test_allocates_indices_only_for_gradients(mode, bytes_per_output, device):
    x = random((2, 4, 64, 64), torch.float32, device).requires_grad_()
    with mode():
        allocated = allocated_bytes(lambda: max_pool2d(x, 2), device)
    assert allocated == bytes_per_output * x.numel() // 4


@each_device
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (15, 2), (16, 3), (17, 3)])
def test_indices_are_bytes_and_checked(kernel, stride, layout, device):
    """Expect uint8 indices up to 255 taps, and zero gradients for invalid indices."""
    x = random((2, 9, 40, 40), torch.float32, device, layout)
    windows = ([kernel] * 2, [stride] * 2, [0, 0], [1, 1], False)
    output, indices = raw.max_pool2d_with_indices(x, *windows)
    is_byte = kernel < 16
    assert indices.dtype == (torch.uint8 if is_byte else torch.int64)
    assert indices.stride() == output.stride()
    assert indices.max() < kernel**2
    channels_last = layout == "channels_last"
    for wrong in (torch.full_like(indices, 255), torch.full_like(indices, -1)):
        grad = raw.max_pool2d_with_indices_backward(output, wrong, *windows, 40, 40, channels_last)
        assert not grad.any() if is_byte else grad.isfinite().all()


def window_starts(size, kernel, stride, padding, dilation, ceil_mode):
    end = size + padding - dilation * (kernel - 1)
    starts = range(-padding, end + stride - 1 if ceil_mode else end, stride)
    return [start for start in starts if start < size]


def pool_pixel_by_pixel(x, grad, tangent, starts, kernel, dilation):
    """Return the output, the gradient of the input and the tangent of the output."""
    pixels = x.tolist()
    out = torch.full(grad.shape, -torch.inf, dtype=torch.float64)
    grad_input, out_tangent = torch.zeros_like(tangent), torch.zeros_like(out)
    for n, c, i, j in product(*map(range, out.shape)):
        maximum = None
        for k, m in product(*map(range, kernel)):
            row, column = starts[0][i] + k * dilation[0], starts[1][j] + m * dilation[1]
            if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                value = pixels[n][c][row][column]
                if maximum is None or value > maximum[0] or value != value:
                    maximum = value, (n, c, row, column)
        if maximum is not None:
            out[n, c, i, j], pixel = maximum
            grad_input[pixel] += grad[n, c, i, j]
            out_tangent[n, c, i, j] = tangent[pixel]
    return out, grad_input, out_tangent


@st.composite
def axes(draw):
    """Draw size, kernel, stride, padding and dilation; in a third, the window misses the image."""
    size, stride = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    if draw(st.integers(0, 2)) == 0:
        return size, 2, stride, 1, size + 1
    kernel = draw(st.integers(1, 5))
    padding = draw(st.integers(0, kernel // 2))
    most = (size + 2 * padding - 1) // max(1, kernel - 1)
    assume(most >= 1)
    return size, kernel, stride, padding, draw(st.integers(1, most))


@each_device
@drawn(150)
@given(
    channels=st.sampled_from((1, 3, 18)),
    vertical=axes(),
    horizontal=axes(),
    ceil_mode=st.booleans(),
    values=st.sampled_from(("distinct", "equal", "NaN")),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS[:3]),
)
@example(1, (2, 1, 1, 0, 1), (3, 2, 1, 1, 4), False, "equal", DTYPES[1], LAYOUTS[0])
def test_matches_pooling_in_python(
    device, channels, vertical, horizontal, ceil_mode, values, dtype, layout
):
    """Unlike PyTorch's, gradients of windows that lie in padding alone reach no pixel."""
    sizes, kernel, stride, padding, dilation = zip(vertical, horizontal, strict=True)
    x = random((2, channels, *sizes), dtype, device)
    x = x if values == "distinct" else x.round()
    if values == "NaN":
        x[random(x.shape, dtype, device, seed=1) > 0.5] = torch.nan
    x = lay_out(x, layout)
    starts = [window_starts(*axis, ceil_mode) for axis in (vertical, horizontal)]
    shape = (2, channels, *map(len, starts))
    grad = random(shape, dtype, device, seed=2).mul(8).round()  # sums are exact
    tangent = random(x.shape, dtype, device, seed=3)

    def pool(x):
        return max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)

    out, out_tangent = torch.func.jvp(pool, (x,), (tangent,))
    out_again, backward = torch.func.vjp(pool, x)
    actual = out, backward(grad)[0], out_tangent
    expected = pool_pixel_by_pixel(
        *(y.double().cpu() for y in (x, grad, tangent)), starts, kernel, dilation
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), e.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out_again, out, rtol=0, atol=0, equal_nan=True)


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
