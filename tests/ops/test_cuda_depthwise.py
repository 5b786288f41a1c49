"""Depthwise problems beyond the 32-bit indices and the shared memory of CUDA kernels."""

import pytest
import torch
import torch.nn.functional as F

from ops import depthwise_conv2d
from tests.ops.tensors import random

pytestmark = pytest.mark.cuda


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
