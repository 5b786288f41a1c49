"""Errors of invalid arguments."""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from ops import DepthwiseConv2d, MaxPool2d, depthwise_conv2d, max_pool2d, ncrelu
from tests.ops.operators import OPERATORS, each_operator
from tests.ops.tensors import as_tuple, inputs, record

each_kernel = pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: the fakes


def calls(op):
    """Return the calls of forward and backward."""
    return record(op, op.cases[0], *inputs(op.cases[0], torch.float32, requires_grad=True))


def convert(args, *targets):
    """Return the arguments with their tensors converted to dtypes and devices."""
    for target in targets:
        args = [x.detach().to(target) if isinstance(x, torch.Tensor) else x for x in args]
    return args


def tensor_indices(args):
    """Return the indices of the tensors if there are several, else none."""
    indices = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    return indices if len(indices) > 1 else []


def error_line(wrong, mode):
    """Return the first line of the error."""
    with mode, pytest.raises(wrong.raises) as raised:
        wrong.call()
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize(
    ("op", "wrong"), [pytest.param(op, w, id=f"{op}: {w}") for op in OPERATORS for w in op.wrong]
)
def test_wrong_argument(op, wrong):
    line = error_line(wrong, nullcontext())
    assert op.name in line
    assert re.search(wrong.pattern, line)
    # A fake raises the same type, with a shorter text.
    assert op.name in error_line(wrong, FakeTensorMode(allow_non_fake_inputs=True))


@each_kernel
@each_operator
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_unsupported_dtype_raises(op, dtype, device):
    for call in calls(op):
        args = convert(call.args, dtype, device)
        with pytest.raises(RuntimeError, match=rf"{call.op._opname}: not implemented for dtype"):
            call.op(*args)


@each_operator
def test_sparse_tensor_raises(op):
    tensors = inputs(op.cases[0], torch.float32)
    for i, x in enumerate(tensors):
        args = [*tensors[:i], x.to_sparse(), *tensors[i + 1 :]]
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: \w+ must be strided, got"):
            op.function(*args, **op.cases[0].kwargs)


@each_kernel
@each_operator
def test_mismatched_dtype_or_rank_raises(op, device):
    for call in calls(op):
        args = convert(call.args, device)
        indices = tensor_indices(args)
        floating = [i for i in indices if args[i].is_floating_point()]
        for i in indices:
            for wrong in (args[i].double(), torch.stack([args[i], args[i]])):
                if floating == [i] and wrong.shape == args[i].shape:
                    continue  # the only floating-point tensor may have any dtype
                with pytest.raises(RuntimeError, match=call.op._opname):
                    call.op(*args[:i], wrong, *args[i + 1 :])


@each_operator
@pytest.mark.parametrize(("here", "there"), [("cpu", "meta"), ("meta", "cpu"), ("cuda", "cpu")])
def test_mismatched_devices_raise(op, here, there):
    for call in calls(op):
        names = [argument.name for argument in call.op._schema.arguments]
        for i in tensor_indices(call.args)[1:]:
            with FakeTensorMode() if here == "cuda" else nullcontext():  # needs no GPU
                args = [
                    torch.empty(x.shape, dtype=x.dtype, device=there if i == k else here)
                    if isinstance(x, torch.Tensor)
                    else x
                    for k, x in enumerate(call.args)
                ]
                with pytest.raises(RuntimeError) as raised:
                    call.op(*args)
            says = f"{call.op._opname}: {names[i]} must be on the device of "
            assert re.match(rf"{says}\w+ \({here}.*\), got {there}", str(raised.value))


@each_operator
def test_meta_tensors(op):
    tensors = inputs(op.cases[0], torch.float32)
    expected = op.function(*tensors, **op.cases[0].kwargs)
    actual = op.function(*(x.to("meta") for x in tensors), **op.cases[0].kwargs)
    for a, e in zip(as_tuple(actual), as_tuple(expected), strict=True):
        assert (a.device.type, a.shape) == ("meta", e.shape)


def test_numpy_integers():
    one, x = np.int64(1), torch.ones(2, 3, 4, 4)
    assert ncrelu(x, one).shape == (2, 6, 4, 4)
    assert DepthwiseConv2d(np.int64(3), one, (one, 2))(x).shape == (2, 3, 4, 2)


@pytest.mark.parametrize("make", [list, tuple])
def test_sequences_of_one_are_ints_as_in_pytorch(make):
    x, one, two = torch.randn(1, 4, 9, 9), make([1]), make([2])
    expected = max_pool2d(x, 2, 2, 1, 1)
    torch.testing.assert_close(max_pool2d(x, two, two, one, one), expected)
    torch.testing.assert_close(MaxPool2d(two, two, one, one)(x), expected)
    weight = torch.randn(4, 1, 3, 3)
    expected = depthwise_conv2d(x, weight, None, 2, 1, 1)
    torch.testing.assert_close(depthwise_conv2d(x, weight, None, two, one, one), expected)
    for wrong in (make([]), make([1, 1, 1]), make([1.0])):
        with pytest.raises(TypeError, match="padding must be an int or a pair of ints, got"):
            max_pool2d(x, 2, padding=wrong)
