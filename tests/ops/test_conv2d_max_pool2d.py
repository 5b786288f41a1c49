"""The float32 CPU gradients of conv2d_max_pool2d, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from ops import conv2d_max_pool2d
from tests.ops.operator_entry import raw

GEOMETRIES = (  # input, weight, stride, padding, pool
    ((128, 6, 14, 14), (16, 6, 5, 5), 1, 0, 2),
    ((128, 1, 28, 28), (6, 1, 5, 5), 1, 2, 2),
    ((33, 20, 9, 9), (5, 20, 3, 3), 1, (0, 1), (3, 2)),
    ((40, 3, 17, 13), (7, 3, 9, 2), 2, 1, (2, 3)),
    ((32, 12, 14, 14), (9, 12, 5, 5), (2, 1), 0, 2),
)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def gradients(function, tensors, grad):
    return torch.autograd.grad(function(*tensors), tensors, grad.to(tensors[0].dtype))


@pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "channels_last"))
@pytest.mark.parametrize(("image", "filters", "stride", "padding", "pool"), GEOMETRIES)
def test_gradients_of_batches(image, filters, stride, padding, pool, layout):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(size, generator=generator).requires_grad_()
        for size in (image, filters, filters[:1])
    ]
    tensors[0] = tensors[0].detach().contiguous(memory_format=layout).requires_grad_()
    output = conv2d_max_pool2d(*tensors, stride, padding, pool=pool)
    grad = torch.randn(output.shape, generator=generator).relu()

    def ours(*tensors):
        return conv2d_max_pool2d(*tensors, stride, padding, pool=pool)

    def exactly(*tensors):
        return F.max_pool2d(F.conv2d(*tensors, stride, padding), pool)

    actual = gradients(ours, tensors, grad)
    exact = gradients(exactly, [x.detach().double().requires_grad_() for x in tensors], grad)
    for a, e in zip(actual, exact, strict=True):
        assert (a - e).abs().max() <= 2e-5 * e.abs().max()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = gradients(ours, tensors, grad)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, actual, alone))


def batch(value=0.0):
    """Return an input with `value` in one pixel, a weight, and a gradient of the pooled output."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(size, generator=generator)
        for size in ((32, 3, 9, 8), (4, 3, 3, 3), (32, 4, 3, 3))
    )
    x[5, 1, 4, 3] = value
    return x.requires_grad_(), weight.requires_grad_(), grad


def stock(x, weight):
    return F.max_pool2d(F.conv2d(x, weight), 2)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_extreme_input(value):
    """Expect PyTorch's gradients, but numbers where it multiplies infinity by a zero gradient."""
    x, weight, grad = batch(value)
    actual = gradients(conv2d_max_pool2d, (x, weight), grad)
    expected = gradients(stock, (x, weight), grad)
    for a, e in zip(actual, expected, strict=True):
        a = torch.where(e.isnan(), e, a)
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_gradient_reaches_its_window_alone(value):
    x, weight, grad = batch()
    grad[4, 1, 1, 1] = value
    actual = gradients(conv2d_max_pool2d, (x, weight), grad)
    expected = gradients(stock, (x, weight), grad)
    for a, e in zip(actual, expected, strict=True):
        assert not e.isfinite().all()
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_invalid_indices_have_no_gradient():
    x, weight, grad = batch()
    indices = torch.full(grad.shape, 4, dtype=torch.uint8)
    lists = [1, 1], [0, 0], [1, 1], [2, 2]
    for of_n in (32, 31):  # by the kernels; by max_pool2d_backward
        tensors = (grad[:of_n], indices[:of_n], x[:of_n].detach(), weight.detach())
        for result in raw.conv2d_max_pool2d_backward(*tensors, *lists, [True] * 3):
            assert not result.any()


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="the gradient of PyTorch 2.10's convolution crashes"
)
def test_sizes_of_padded_images_do_not_overflow():
    """Rows x columns of the padded image exceed 2^63: PyTorch's convolution gets the arguments."""
    x, weight = torch.randn(32, 2, 8, 8), torch.randn(1, 2, 3, 3)
    grad, indices = torch.zeros(32, 1, 4, 2), torch.zeros(32, 1, 4, 2, dtype=torch.uint8)
    windows = ([2**29] * 2, [2**31 - 1, 2**30], [1, 1], [2, 2])
    backward = torch.ops.lenet_ops.conv2d_max_pool2d_backward
    try:
        # without grad_input, which takes PyTorch seconds
        grads = backward(grad, indices, x, weight, *windows, [False, True, True])
    except RuntimeError as error:  # PyTorch may refuse them
        assert "std::vector" not in str(error)
    else:
        assert all(g.count_nonzero() == 0 for g in grads)
