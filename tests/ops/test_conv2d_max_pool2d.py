"""The float32 CPU gradients of conv2d_max_pool2d, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from ops import conv2d_max_pool2d

GEOMETRIES = (  # input, weight, stride, padding, pool
    ((128, 6, 14, 14), (16, 6, 5, 5), 1, 0, 2),
    ((128, 1, 28, 28), (6, 1, 5, 5), 1, 2, 2),
    ((33, 20, 9, 9), (5, 20, 3, 3), 1, (0, 1), (3, 1)),
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

    def stock(*tensors):
        return F.max_pool2d(F.conv2d(*tensors, stride, padding), pool)

    actual = gradients(ours, tensors, grad)
    exact = gradients(stock, [x.detach().double().requires_grad_() for x in tensors], grad)
    for a, e in zip(actual, exact, strict=True):
        assert (a - e).abs().max() <= 2e-5 * e.abs().max()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = gradients(ours, tensors, grad)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, actual, alone))


def test_nan_gradient_reaches_weight_and_input():
    x, weight = torch.randn(32, 2, 6, 6, requires_grad=True), torch.randn(3, 2, 3, 3)
    output = conv2d_max_pool2d(x, weight.requires_grad_())
    grad = torch.zeros_like(output)
    grad[4, 1] = torch.nan
    of_x, of_weight = torch.autograd.grad(output, (x, weight), grad)
    assert of_weight.isnan().any((1, 2, 3)).tolist() == [False, True, False]
    assert of_x.isnan().any((1, 2, 3)).nonzero().tolist() == [[4]]
