"""Wrong arguments raise what a built-in would raise, and say what is wrong."""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from ops import DepthwiseConv2d, ncrelu
from tests.ops.operators import OPERATORS, each_operator
from tests.ops.tensors import as_tuple, inputs, record

# Kernels, and the fakes that stand for them where tensors have no memory.
each_place = pytest.mark.parametrize("place", ["cpu", "meta"])


def calls(op):
    """The calls of a training, forward and backward."""
    return record(op, op.cases[0], *inputs(op.cases[0], torch.float32, requires_grad=True))


def moved(args, *to):
    """Returns the arguments with their tensors of another dtype or device."""
    for target in to:
        args = [x.detach().to(target) if isinstance(x, torch.Tensor) else x for x in args]
    return args


def places_of_tensors(args):
    """Returns where the tensors are, if there are several: one cannot disagree with another."""
    places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    return places if len(places) > 1 else []


def error_line(wrong, mode):
    """Returns the first line of the error that a wrong call raises."""
    with mode, pytest.raises(wrong.raises) as raised:
        wrong.call()
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize(
    ("op", "wrong"), [pytest.param(op, w, id=f"{op}: {w}") for op in OPERATORS for w in op.wrong]
)
def test_wrong_argument(op, wrong):
    """Kernels (C++) and fakes (Python) raise the same message."""
    line = error_line(wrong, nullcontext())
    assert op.name in line
    assert re.search(wrong.pattern, line)
    fake_line = error_line(wrong, FakeTensorMode(allow_non_fake_inputs=True))
    assert fake_line == line or line.startswith("Could not run")  # by PyTorch: there is no kernel


@each_place
@each_operator
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused(op, dtype, place):
    """Straight through torch.ops, forward and backward."""
    for call in calls(op):
        args = moved(call.args, dtype, place)
        with pytest.raises(RuntimeError, match=rf"{call.op._opname}: not implemented for dtype"):
            call.op(*args)


@each_operator
def test_sparse_tensors_are_refused(op):
    tensors = inputs(op.cases[0], torch.float32)
    for i, x in enumerate(tensors):
        args = [*tensors[:i], x.to_sparse(), *tensors[i + 1 :]]
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: \w+ must be strided, got"):
            op.function(*args, **op.cases[0].kwargs)


@each_place
@each_operator
def test_tensors_that_disagree_are_refused(op, place):
    """Any one of several tensors of another dtype, or with a dimension more."""
    for call in calls(op):
        args = moved(call.args, place)
        places = places_of_tensors(args)
        floating = [i for i in places if args[i].is_floating_point()]
        for i in places:
            for wrong in (args[i].double(), torch.stack([args[i], args[i]])):
                if floating == [i] and wrong.shape == args[i].shape:
                    continue  # there is none whose dtype it should have
                with pytest.raises(RuntimeError, match=call.op._opname):
                    call.op(*args[:i], wrong, *args[i + 1 :])


@each_operator
@pytest.mark.parametrize(("here", "there"), [("cpu", "meta"), ("meta", "cpu"), ("cuda", "cpu")])
def test_tensors_on_two_devices_are_refused(op, here, there):
    """As built-ins do, also where one has no memory, or (CUDA, here) none is real."""
    for call in calls(op):
        names = [argument.name for argument in call.op._schema.arguments]
        for i in places_of_tensors(call.args)[1:]:
            with FakeTensorMode() if here == "cuda" else nullcontext():
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
    """Shapes without memory: enough for fakes, nothing for kernels."""
    tensors = inputs(op.cases[0], torch.float32)
    expected = op.function(*tensors, **op.cases[0].kwargs)
    actual = op.function(*(x.to("meta") for x in tensors), **op.cases[0].kwargs)
    for a, e in zip(as_tuple(actual), as_tuple(expected), strict=True):
        assert (a.device.type, a.shape) == ("meta", e.shape)


def test_integers_of_numpy():
    """Sizes are often computed: built-ins take NumPy's integers, and so do we."""
    one, x = np.int64(1), torch.ones(2, 3, 4, 4)
    assert ncrelu(x, one).shape == (2, 6, 4, 4)
    assert DepthwiseConv2d(np.int64(3), one, (one, 2))(x).shape == (2, 3, 4, 2)
