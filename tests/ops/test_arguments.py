"""Wrong arguments raise what a built-in would raise, and say what is wrong."""

import re

import numpy as np
import pytest
import torch

from ops import DepthwiseConv2d, ncrelu
from tests.ops.operators import OPERATORS, each_operator
from tests.ops.tensors import as_tuple, inputs, record


@pytest.mark.parametrize(
    ("op", "wrong"), [pytest.param(op, w, id=f"{op}: {w}") for op in OPERATORS for w in op.wrong]
)
def test_wrong_argument(op, wrong):
    with pytest.raises(wrong.raises) as raised:
        wrong.call()
    first_line = str(raised.value).splitlines()[0]
    assert op.name in first_line
    assert re.search(wrong.pattern, first_line)


@each_operator
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_kernels_refuse_other_dtypes(op, dtype):
    """Straight through torch.ops, forward and backward."""
    tensors = inputs(op.cases[0], torch.float32, requires_grad=True)
    for call in record(op, op.cases[0], *tensors):
        args = [x.detach().to(dtype) if isinstance(x, torch.Tensor) else x for x in call.args]
        with pytest.raises(RuntimeError, match=rf"{call.op._opname}: not implemented for dtype"):
            call.op(*args)


@each_operator
def test_kernels_refuse_tensors_that_disagree(op):
    """Any one of several tensors of another dtype, or with a dimension more."""
    tensors = inputs(op.cases[0], torch.float32, requires_grad=True)
    forward, backward = record(op, op.cases[0], *tensors)
    for call in (forward, backward):
        positions = [i for i, x in enumerate(call.args) if isinstance(x, torch.Tensor)]
        if len(positions) == 1:
            continue  # one tensor cannot disagree with another
        for i in positions:
            x = call.args[i].detach()
            for wrong in (x.double(), x[None]):
                args = [*call.args[:i], wrong, *call.args[i + 1 :]]
                with pytest.raises(RuntimeError, match=call.op._opname):
                    call.op(*args)


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
