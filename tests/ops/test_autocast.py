"""Dtypes of outputs and gradients in autocast regions."""

import pytest
import torch

from tests.ops.operators import each_device, each_operator
from tests.ops.tensors import as_tuple, inputs, total

each_region = pytest.mark.parametrize("region", [torch.bfloat16, torch.float16], ids=str)


@each_device
@each_region
@each_operator
def test_autocast(op, region, device):
    tensors = inputs(op.cases[0], torch.float32, device, requires_grad=True)
    with torch.autocast(device, dtype=region):
        actual = as_tuple(op.function(*tensors, **op.cases[0].kwargs))
    inner = region if op.autocast == "region" else torch.float32
    expected = as_tuple(op.function(*(x.to(inner) for x in tensors), **op.cases[0].kwargs))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == inner
        assert torch.equal(a, e)
    total(actual).backward()
    assert {x.grad.dtype for x in tensors} == {torch.float32}


@each_device
@each_operator
def test_autocast_of_low_precision_input_and_float32_parameters(op, device):
    first, *rest = inputs(op.cases[0], torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for y in as_tuple(op.function(first.bfloat16(), *rest, **op.cases[0].kwargs)):
            widened = op.autocast == "float32" and device == "cuda"
            assert y.dtype == (torch.float32 if widened else torch.bfloat16)


@each_device
@each_operator
def test_autocast_leaves_float64_alone(op, device):
    tensors = inputs(op.cases[0], torch.float64, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for y in as_tuple(op.function(*tensors, **op.cases[0].kwargs)):
            assert y.dtype == torch.float64


@each_device
@each_operator
def test_autocast_disabled_inside(op, device):
    tensors = inputs(op.cases[0], torch.float32, device)
    with torch.autocast(device), torch.autocast(device, enabled=False):
        for y in as_tuple(op.function(*tensors, **op.cases[0].kwargs)):
            assert y.dtype == torch.float32
