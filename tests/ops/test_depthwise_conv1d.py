"""depthwise_conv1d against F.conv1d(groups=C), on random and on chosen geometries."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

from ops import DepthwiseConv1d, depthwise_conv1d
from tests.ops.entries.depthwise_conv1d import sides
from tests.ops.geometries import drawn, pairs
from tests.ops.operators import each_device
from tests.ops.tensors import (
    DTYPES,
    LAYOUTS,
    Recorder,
    assert_accurate,
    double,
    gradients,
    random,
)

PLANES, CHANNELS_LAST = "contiguous", "transposed"
each_layout = pytest.mark.parametrize("layout", [PLANES, CHANNELS_LAST])
each_short_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# Rows or channels are long: vector loops have a body and a tail.
sequences = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 90)) | (
    st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 12))
)


def peer(x, weight, bias, stride, padding, dilation, activation):
    x = F.pad(x, sides(padding, dilation * (weight.shape[-1] - 1)))
    y = F.conv1d(x, weight, bias, stride, 0, dilation, groups=x.shape[1])
    return F.silu(y) if activation == "silu" else y


def assert_gradient_accurate(actual, expected, grad, taps, activation):
    """Compare a gradient; each term of its sums may have been rounded, if it is that of SiLU."""
    terms = taps * grad.numel() / actual.numel()
    roundings = 1 + terms**0.5 if activation else 1
    assert_accurate(actual, expected, actual.dtype, terms, roundings)


def compare(device, shape, taps, geometry, bias, dtype, layout, grad_layout):
    channels = shape[1]
    tensors = [
        random(shape, dtype, device, layout, seed=1),
        random((channels, 1, taps), dtype, device, seed=2),
        random((channels,), dtype, device, seed=3) if bias else None,
    ]
    for x in tensors:
        if x is not None:
            x.requires_grad_()
    exact = double(tensors)
    actual, expected = depthwise_conv1d(*tensors, *geometry), peer(*exact, *geometry)
    assert_accurate(actual, expected, dtype, terms=taps)
    grad = random(expected.shape, dtype, device, grad_layout, seed=4)
    of_input, *of_parameters = gradients(expected, exact, double([grad]))
    requests = [(tensors, [of_input, *of_parameters])]
    if device == "cuda":  # other kernels may run for one gradient alone
        requests += [(tensors[:1], [of_input]), (tensors[1:], of_parameters)]
    for wanted, exact_gradients in requests:
        actual = depthwise_conv1d(*tensors, *geometry)
        for a, e in zip(gradients(actual, wanted, [grad]), exact_gradients, strict=True):
            assert_gradient_accurate(a, e, grad, taps, geometry[-1])


@each_device
@drawn(300)
@given(
    shape=sequences,
    taps=st.integers(1, 9) | st.integers(10, 40),
    stride=st.integers(1, 4),
    padding=st.sampled_from(["causal", "same"]) | pairs(0, 5) | pairs(6, 60),
    dilation=st.integers(1, 4),
    activation=st.sampled_from([None, "silu"]),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
)
@example((2, 3, 30), 4, 1, "causal", 1, "silu", True, torch.float32, PLANES, PLANES)
@example((2, 20, 30), 4, 1, "causal", 1, "silu", True, torch.float32, *[CHANNELS_LAST] * 2)
@example((1, 2, 50), 3, 40, (100, 7), 1, None, True, torch.float32, PLANES, PLANES)
@example((1, 20, 50), 3, 40, (100, 7), 1, None, True, torch.float32, *[CHANNELS_LAST] * 2)
def test_matches_conv1d(
    device, shape, taps, stride, padding, dilation, activation, bias, dtype, layout, grad_layout
):
    span = dilation * (taps - 1)
    assume(shape[2] + sum(sides(padding, span)) > span and (padding != "same" or stride == 1))
    geometry = (stride, padding, dilation, activation)
    compare(device, shape, taps, geometry, bias, dtype, layout, grad_layout)


# Channels are multiplied by it: small problems run in one kernel on CUDA.
MULTIPLES = {"cpu": 1, "cuda": 16}
# Rows of several tiles and of none that is whole; rows that all begin at a multiple of 16 bytes,
# and others.
SHAPES = [(2, 15, 4501), (3, 10, 4504), (3, 130, 70), (1, 72, 300)]


# Filters with kernels of their own, and others.
@each_device
@each_short_dtype
@each_layout
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("taps", "stride", "padding", "dilation"),
    [
        *((k, 1, "causal", 1) for k in (*range(1, 10), 15, 31, 65, 128)),
        *((k, 1, "same", 1) for k in (3, 31)),
        *((k, 2, (1, 1), 1) for k in (3, 4)),
        (3, 1, "causal", 25),
        (4, 4, (0, 3), 1),
        (2, 5, (7, 7), 3),
    ],
)
def test_every_filter(taps, stride, padding, dilation, shape, activation, layout, dtype, device):
    images, channels, length = shape
    shape = (images, channels * MULTIPLES[device], length)
    geometry = (stride, padding, dilation, activation)
    compare(device, shape, taps, geometry, True, dtype, layout, layout)


# A chunk of outputs in the middle of a row reads far sources only, or none at all.
@each_device
@each_layout
@pytest.mark.parametrize(
    ("length", "taps", "stride", "padding", "dilation"),
    [
        (6000, 3, 1, "causal", 2900),
        (6000, 2, 1, (5999, 5999), 5999),
        (9, 3, 7, (20000, 20000), 2),
        (40, 40, 39, 0, 1),
    ],
)
def test_distant_taps_and_wide_padding(length, taps, stride, padding, dilation, layout, device):
    geometry = (stride, padding, dilation, None)
    compare(device, (2, 8, length), taps, geometry, True, torch.float32, layout, layout)


@each_device
@each_layout
def test_zeros_of_padding_are_not_stored(layout, device):
    """Pad by 2³¹ on each side; the two outputs read x[0] with different taps."""
    x = random((2, 8, 10), torch.float32, device, layout).requires_grad_()
    weight = random((8, 1, 2), torch.float32, device, seed=1).requires_grad_()
    actual = depthwise_conv1d(x, weight, None, 2**31, (2**31, 2**31), 2**31)
    expected = x[..., :1] * weight[:, 0].flip(1)
    torch.testing.assert_close(actual, expected)
    grad = random((2, 8, 2), torch.float32, device, seed=2)
    for a, e in zip(
        gradients(actual, [x, weight], [grad]),
        gradients(expected, [x, weight], [grad]),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@each_device
@each_short_dtype
@pytest.mark.parametrize("activation", [None, "silu"])
def test_views_are_not_copied(device, dtype, activation):
    """Compare slices of projections, sequence-first tensors and repetitions."""
    length = 70 * MULTIPLES[device]
    planes = random((3, 48, length), dtype, device, seed=1)
    projection = random((3, length, 48), dtype, device, seed=1).transpose(1, 2)
    weight = random((20, 1, 4), dtype, device, seed=2).requires_grad_()
    for x in (
        planes[:, 28:],
        planes[:, :40:2],
        planes[:, :20, 3:],
        planes[:1, :20].expand(5, -1, -1),
        planes[:, :1].expand(-1, 20, -1),
        projection[:, 28:],
        projection[:, 3:23, ::2],
        projection[:1, :20].expand(5, -1, -1),
        random((length, 3, 20), dtype, device, seed=3).permute(1, 2, 0),
    ):
        x = x.detach().requires_grad_()
        exact = double([x, weight])
        geometry = (1, "causal", 1, activation)
        actual = depthwise_conv1d(x, weight, None, *geometry)
        expected = peer(*exact, None, *geometry)
        assert_accurate(actual, expected, dtype)
        assert actual.transpose(1, 2).is_contiguous() == (x.stride(1) == 1)
        assert actual.is_contiguous() == (x.stride(1) != 1)
        grad = random(expected.shape, dtype, device, seed=4)
        for a, e in zip(
            gradients(actual, [x, weight], [grad]),
            gradients(expected, exact, double([grad])),
            strict=True,
        ):
            assert_gradient_accurate(a, e, grad, 4, activation)


@each_device
@each_short_dtype
@pytest.mark.parametrize("taps", [3, 31])
@pytest.mark.parametrize("length", [600, 601])
def test_tensors_may_begin_at_any_element(device, dtype, taps, length):
    """Compare contiguous tensors that begin one element after an aligned address."""
    channels = 5 * MULTIPLES[device]
    shape, size = (2, channels, length), 2 * channels * length
    x, grad = (random((size + 1,), dtype, device, seed=i)[1:].view(shape) for i in (1, 2))
    weight = random((channels, 1, taps), dtype, device, seed=3).requires_grad_()
    x.requires_grad_()
    exact = double([x, weight])
    geometry = (None, 1, "causal", 1, "silu")
    actual, expected = depthwise_conv1d(x, weight, *geometry), peer(*exact, *geometry)
    assert_accurate(actual, expected, dtype, terms=taps)
    pairs_of_gradients = zip(
        gradients(actual, [x, weight], [grad]),
        gradients(expected, exact, double([grad])),
        strict=True,
    )
    for a, e in pairs_of_gradients:
        assert_gradient_accurate(a, e, grad, taps, "silu")


@each_device
@each_short_dtype
@each_layout
@pytest.mark.parametrize("taps", [5, 12])
@pytest.mark.parametrize("length", [9, 37, 2100])
def test_padding_is_not_multiplied_by_infinity(device, dtype, layout, length, taps):
    channels = 20 * MULTIPLES[device]
    x = random((2, channels, length), dtype, device, layout, seed=1)
    x[0, 1, -1] = x[0, 1, 0] = torch.inf
    x[1, 2, 4] = -torch.inf
    weight = random((channels, 1, taps), dtype, device, seed=2).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    geometry = (None, 1, "same", 1, None)
    actual, expected = depthwise_conv1d(x, weight, *geometry), peer(x.double(), exact, *geometry)
    assert torch.equal(actual.isinf(), expected.isinf())
    grad = random(expected.shape, dtype, device, layout, seed=4)
    (actual,) = torch.autograd.grad(actual, weight, grad)
    (expected,) = torch.autograd.grad(expected, exact, grad.double())
    right = (actual.isinf() == expected.isinf()) & (actual.isnan() == expected.isnan())
    assert torch.all(right | (actual.isnan() & (device == "cuda")))
    finite = [c for c in range(channels) if c not in (1, 2)]
    assert actual[finite].isfinite().all()


@each_device
@each_layout
def test_gradients_sum_four_million_terms_accurately(layout, device):
    channels = 2 if device == "cpu" else 8
    shape = (16, channels, 2**18)
    x, grad = (random(shape, torch.float32, device, layout, seed=i).abs() for i in (0, 1))
    weight = torch.zeros(channels, 1, 3, device=device)
    _, of_weight, of_bias = torch.ops.lenet_ops.depthwise_conv1d_backward(
        grad, x, weight, None, 1, [1, 1], 1, False, [False, True, True]
    )
    exact = torch.stack(((x.double() * grad.double()).sum((0, 2)), grad.double().sum((0, 2))))
    actual = torch.stack((of_weight[:, 0, 1], of_bias)).double()
    limit = torch.finfo(torch.float32).eps * (1 if device == "cpu" else 16)
    assert (actual / exact - 1).abs().max() < limit


def test_gradient_of_silu_is_not_computed_without_need():
    x, weight = torch.randn(2, 3, 9), torch.randn(3, 1, 4, requires_grad=True)
    with Recorder() as recorder:
        depthwise_conv1d(x, weight, None, 1, "causal", 1, "silu").sum().backward()
    forward, backward = recorder.calls
    assert forward.args[-1] is backward.args[-2] is True
    assert [y.numel() > 0 for y in backward.outputs] == [False, True, False]


def test_sequences_of_one_are_ints_as_in_pytorch():
    x, weight = torch.randn(1, 4, 9), torch.randn(4, 1, 3)
    expected = F.conv1d(x, weight, None, 2, 1, 2, groups=4)
    for make in (list, tuple):
        one, two = make([1]), make([2])
        torch.testing.assert_close(depthwise_conv1d(x, weight, None, two, one, two), expected)
        layer = DepthwiseConv1d(4, make([3]), two, one, two)
        assert (layer.kernel_size, layer.stride, layer.dilation) == ((3,), (2,), (2,))
    two = np.int64(2)
    actual = depthwise_conv1d(x, weight, None, two, np.int64(1), two)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"padding": 1}, "4, 4, kernel_size=(3,), stride=(1,), padding=(1, 1), groups=4"),
        ({"padding": "causal", "dilation": 2, "activation": "silu"}, None),
        ({"padding": "same", "bias": False}, None),
        ({"padding": (2, 0)}, None),
        ({"padding": "valid", "dilation": 2, "activation": "identity"}, None),
    ],
)
def test_layer(arguments, text):
    layer = DepthwiseConv1d(4, 3, **arguments)
    shown = repr(layer)
    for key, value in arguments.items():
        assert key == "padding" or f"{key}={value!r}" in shown or f"{key}=({value},)" in shown
    assert text is None or text in shown
    x = torch.randn(2, 4, 9)
    geometry = (1, arguments.get("padding"), arguments.get("dilation", 1))
    expected = peer(x, layer.weight, layer.bias, *geometry, arguments.get("activation"))
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0]), expected[0])
    nn.Conv1d(4, 4, 3, groups=4, bias=layer.bias is not None).load_state_dict(layer.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((4, 0), ValueError, "kernel_size must be at least 1, got 0"),
        ((4, (3, 3)), TypeError, "kernel_size must be int, not tuple"),
        (
            (4, 3, 1, "full"),
            ValueError,
            'an int, a pair of ints, "valid", "same" or "causal", got \'full\'',
        ),
        ((4, 3, 2, "same"), ValueError, "padding='same' is not supported for strided"),
        ((4, 3, 1, -1), ValueError, "padding must be at least 0, got -1"),
        ((4, 3, 1, 0, 1, 1), TypeError, "bias must be bool, not int"),
        ((4, 3, 1, 0, 1, True, "relu"), ValueError, 'activation must be one of None, "silu", got'),
        ((4, 3, 1, 0, 1, True, True), TypeError, 'activation must be one of None, "silu", got'),
    ],
)
def test_wrong_arguments_of_the_layer(arguments, error, text):
    with pytest.raises(error) as raised:
        DepthwiseConv1d(*arguments)
    assert text in str(raised.value)
