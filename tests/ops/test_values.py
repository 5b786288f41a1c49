"""Outputs and gradients against the float64 reference."""

import pytest
import torch

from tests.ops.operators import OPERATORS, each_case, each_device, each_operator
from tests.ops.tensors import (
    CHANNELS_LAST,
    DTYPES,
    LAYOUTS,
    as_tuple,
    assert_accurate,
    double,
    gradients,
    inputs,
    random,
    total,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_empty = pytest.mark.parametrize(
    ("op", "case"), [pytest.param(op, c, id=f"{op} {c}") for op in OPERATORS for c in op.empty]
)
EXTREMES = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


def check(op, case, dtype, tensors, layout="contiguous"):
    """Compare outputs and gradients with the reference; grad_output has `layout`, too."""
    actual = as_tuple(op.function(*tensors, **case.kwargs))
    exact = double(tensors)
    expected = as_tuple(op.reference(*exact, **case.kwargs))
    grads = [random(y.shape, dtype, y.device, layout, seed=9) for y in expected]
    for a, e in zip(actual, expected, strict=True):
        assert_accurate(a, e, dtype, roundings=op.roundings)
    for a, e in zip(
        gradients(actual, tensors, grads), gradients(expected, exact, double(grads)), strict=True
    ):
        assert a.shape == e.shape
        terms = grads[0].numel() / max(1, a.numel())
        assert_accurate(a, e, dtype, terms, roundings=op.roundings)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
@each_case
def test_matches_reference(op, case, dtype, layout, device):
    check(op, case, dtype, inputs(case, dtype, device, layout, requires_grad=True), layout)


@each_device
@each_case
def test_expanded_gradient(op, case, device):
    """Compare gradients of `.sum()`, whose grad_output has zero strides."""
    tensors = inputs(case, torch.float64, device, requires_grad=True)
    exact = double(tensors)
    for function, args in ((op.function, tensors), (op.reference, exact)):
        total(function(*args, **case.kwargs)).backward()
    for x, e in zip(tensors, exact, strict=True):
        if x is not None:
            assert_accurate(x.grad, e.grad, torch.float64)


@each_device
@each_dtype
@each_operator
def test_many_elements(op, dtype, device):
    tensors = inputs(op.bulk, dtype, device, requires_grad=True)
    check(op, op.bulk, dtype, tensors)


@each_device
@each_dtype
@each_empty
def test_empty(op, case, dtype, device):
    check(op, case, dtype, inputs(case, dtype, device, requires_grad=True))


@each_device
@each_case
def test_keeps_memory_format(op, case, device):
    tensors = inputs(case, torch.float32, device, "channels_last", requires_grad=True)
    output = as_tuple(op.function(*tensors, **case.kwargs))[0]
    grad = torch.ones_like(output, memory_format=torch.contiguous_format)
    output.backward(grad)
    memory_format = CHANNELS_LAST.get(output.dim(), torch.contiguous_format)
    assert output.is_contiguous(memory_format=memory_format)
    assert tensors[0].grad.is_contiguous(memory_format=memory_format)


@each_device
@each_dtype
@each_operator
def test_extreme_values(op, dtype, device):
    case = op.cases[0]
    largest = min(torch.finfo(dtype).max, op.largest)
    tensors = inputs(case, dtype, device)
    for i, value in enumerate((*EXTREMES, largest, -largest, torch.finfo(dtype).tiny)):
        tensors[0].flatten()[7 * i] = value
    for x in tensors:
        x.requires_grad_()
    exact = double(tensors)
    actual = as_tuple(op.function(*tensors, **case.kwargs))
    expected = as_tuple(op.reference(*exact, **case.kwargs))
    grads = [random(y.shape, dtype, device, seed=9) for y in expected]
    actual += tuple(gradients(actual, tensors, grads))
    expected += tuple(gradients(expected, exact, double(grads)))
    for i, (a, e) in enumerate(zip(actual, expected, strict=True), start=-len(grads)):
        rounded = e.to(dtype).double()  # with the dtype's overflow to infinity
        if device == "cuda" and i == op.nan_gradient:
            rounded[a.isnan()] = torch.nan
        epsilon = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        rtol = 32 * epsilon + (op.roundings * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0)
        name = f"gradient of tensor {i}" if i >= 0 else f"output {i + len(grads)}"
        torch.testing.assert_close(
            *(a.double(), rounded), rtol=rtol, atol=rtol, equal_nan=True, msg=f"{name}: {{}}".format
        )


@each_device
@each_operator
def test_negative_view(op, device):
    """Compare a tensor with the negative bit, whose memory has the other sign."""
    case = op.cases[0]
    tensors = inputs(case, torch.float32, device)
    negated = torch.complex(tensors[0], -tensors[0]).conj().imag
    assert negated.is_neg()
    expected = as_tuple(op.function(*tensors, **case.kwargs))
    for a, e in zip(
        as_tuple(op.function(negated, *tensors[1:], **case.kwargs)), expected, strict=True
    ):
        assert torch.equal(a, e)
