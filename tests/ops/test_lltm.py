"""LLTM: its loop over cells, its modules' arguments, saturated and rounded values."""

import pytest
import torch

from ops import LLTM, LLTMCell, lltm, lltm_cell
from tests.ops.entries.lltm import reference
from tests.ops.operators import each_device
from tests.ops.tensors import DTYPES, assert_accurate, double, gradients, random

STEPS, BATCH, INPUT, STATE = 5, 3, 4, 6


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return LLTM(INPUT, STATE, dtype=torch.float64)


@pytest.fixture
def sequence():
    return torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64)


def test_sequence_is_a_loop_of_cells(layer, sequence):
    output, (h, c) = layer(sequence)
    cell = LLTMCell(INPUT, STATE, dtype=torch.float64)
    cell.load_state_dict(layer.state_dict())
    state = None
    for x, expected in zip(sequence, output, strict=True):
        state = cell(x, state)
        torch.testing.assert_close(state[0], expected)
    torch.testing.assert_close((h, c), state)


def test_state_continues_a_sequence(layer, sequence):
    output, state = layer(sequence)
    first, between = layer(sequence[:2])
    second, last = layer(sequence[2:], between)
    torch.testing.assert_close(torch.cat((first, second)), output)
    torch.testing.assert_close(last, state)


def test_batch_first(layer, sequence):
    output, state = layer(sequence)
    layer.batch_first = True
    swapped, same = layer(sequence.transpose(0, 1))
    assert torch.equal(swapped, output.transpose(0, 1))
    assert all(map(torch.equal, same, state))


def test_without_a_batch(layer, sequence):
    output, (h, c) = layer(sequence)
    alone, (h0, c0) = layer(sequence[:, 0])
    for actual, expected in ((alone, output[:, 0]), (h0, h[0]), (c0, c[0])):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected)
    x, weights, bias = sequence[0], layer.weights, layer.bias
    one = lltm_cell(x[0], weights, bias, h[0], c[0])
    torch.testing.assert_close(one, tuple(y[0] for y in lltm_cell(x, weights, bias, h, c)))


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state", [128, 300])
def test_large_state(state, dtype, device):
    """Cover states that fill a CUDA block, and larger ones."""
    shapes = ((3, 9, 7), (3 * state, state + 7), (3 * state,), (9, state), (9, state))
    tensors = [
        (random(shape, dtype, device, seed=i) / 16).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    actual = lltm(*tensors)
    exact = double(tensors)
    expected = reference(*exact)
    grads = [random(y.shape, dtype, device, seed=9) for y in expected]
    for a, e in zip(actual, expected, strict=True):
        assert_accurate(a, e, dtype, terms=state, roundings=3)
    for a, e in zip(
        gradients(actual, tensors, grads), gradients(expected, exact, double(grads)), strict=True
    ):
        assert_accurate(a, e, dtype, terms=state, roundings=6)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradient_of_one_output(layer, sequence, used):
    """Compare undefined gradients of the other outputs with zeros."""
    tensors = (sequence.requires_grad_(), layer.weights, layer.bias, *torch.randn(2, BATCH, STATE))
    tensors = tuple(x.double() for x in tensors)
    outputs = lltm(*tensors)
    weights = [
        torch.ones_like(y) if i == used else torch.zeros_like(y) for i, y in enumerate(outputs)
    ]
    expected = torch.autograd.grad(outputs, tensors[:3], weights, retain_graph=True)
    actual = torch.autograd.grad(outputs[used].sum(), tensors[:3])
    torch.testing.assert_close(actual, expected)


def test_saturated_gates():
    """Expect closed or open gates, and no NaN, where exp overflows or underflows."""
    weights, zeros = torch.zeros(3, 2), torch.zeros(1, 1)
    for x in (1e30, 100.0, 88.1, 87.5):
        bias = torch.tensor([-x, x, x])
        h, c = lltm_cell(zeros, weights, bias, zeros, zeros)
        assert (h, c) == (0, 0) or c < 1e-35
        h, c = lltm_cell(zeros, weights, -bias, zeros, zeros)
        assert (h.abs().item(), c.item()) == (pytest.approx(0, abs=1e-37), -1)


def test_repr():
    assert repr(LLTMCell(4, 6)) == "LLTMCell(4, 6)"
    assert repr(LLTM(4, 6, bias=False, batch_first=True)) == (
        "LLTM(4, 6, bias=False, batch_first=True)"
    )


@pytest.mark.parametrize(
    ("arguments", "raises", "says"),
    [
        ((0, 3), ValueError, ("input_size", "at least 1", "0")),
        ((3, -1), ValueError, ("hidden_size", "at least 1", "-1")),
        ((3, 2.0), TypeError, ("hidden_size", "int", "float")),
        ((3, True), TypeError, ("hidden_size", "int", "bool")),
        ((3, 4, "cpu"), TypeError, ("bias", "bool", "str")),
    ],
)
def test_constructor(arguments, raises, says):
    for module in (LLTM, LLTMCell):
        with pytest.raises(raises) as raised:
            module(*arguments)
        for words in (module.__name__, *says):
            assert words in str(raised.value)


def test_device_in_place_of_batch_first_raises():
    with pytest.raises(TypeError, match="LLTM: batch_first must be bool, not str"):
        LLTM(4, 5, True, "cpu")


@pytest.mark.parametrize("module", [LLTM, LLTMCell])
def test_wrong_input_or_state_raises(module):
    layer, h = module(4, 5), torch.zeros(3, 5)
    for arguments, raises, says in (
        ((torch.randn(3, 6),), RuntimeError, r"input must have 4 features .* \[3, 6\]"),
        ((None,), TypeError, "input must be Tensor, not NoneType"),
        ((torch.randn(3, 4), h), TypeError, r"state must be a pair .* \(h, c\), got Tensor"),
        ((torch.randn(3, 4), (h,)), TypeError, r"state must be a pair .*, got tuple of 1"),
        ((torch.randn(3, 4), (h, h.T)), RuntimeError, r"state c must have 5 features .* \[5, 3\]"),
    ):
        with pytest.raises(raises, match=f"{module.__name__}: {says}"):
            layer(*arguments)


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_read_the_rounded_h(dtype, device):
    """Cancel h · 512 with h · −512: exact only if the recurrence uses h rounded to `dtype`."""
    bias = torch.tensor([0.375, -0.625, 0.8125], dtype=dtype, device=device)
    weights = torch.tensor([[512.0, -512.0]], dtype=dtype, device=device).expand(3, 2)
    zeros = torch.zeros(1, 1, dtype=dtype, device=device)
    first, *_ = lltm(zeros[None], weights, bias, zeros, zeros)
    output, *_ = lltm(torch.cat((zeros[None], first)), weights, bias, zeros, zeros)
    i, o, z = bias.double()
    cell = 2 * torch.nn.functional.elu(z) * i.sigmoid()
    expected = (cell.tanh() * o.sigmoid()).to(dtype)
    torch.testing.assert_close(output[1, 0, 0], expected, rtol=torch.finfo(dtype).eps, atol=0)
