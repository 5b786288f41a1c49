"""Bitwise equal results across runs and thread counts."""

import pytest
import torch

from tests.ops.operators import each_device, each_operator
from tests.ops.tensors import as_tuple, gradients, inputs, random

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def forward_and_backward(op, dtype, device="cpu"):
    tensors = inputs(op.bulk, dtype, device, requires_grad=True)
    outputs = as_tuple(op.function(*tensors, **op.bulk.kwargs))
    grads = [random(y.shape, dtype, device, seed=9) for y in outputs]
    return [*outputs, *gradients(outputs, tensors, grads)]


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@each_device
@each_dtype
@each_operator
def test_runs_are_bitwise_equal(op, dtype, device):
    first = forward_and_backward(op, dtype, device)
    for _ in range(3):
        assert_same_bits(first, forward_and_backward(op, dtype, device))


@each_dtype
@each_operator
def test_thread_counts_are_bitwise_equal(op, dtype):
    if op.uses_matmul:
        pytest.skip("torch.mm's bits depend on the number of threads")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = forward_and_backward(op, dtype)
        for several in (2, 3):
            torch.set_num_threads(several)
            assert_same_bits(alone, forward_and_backward(op, dtype))
    finally:
        torch.set_num_threads(threads)
