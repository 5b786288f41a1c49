"""involution2d on random geometries and in both memory formats; Involution2d."""

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ops import Involution2d, involution2d
from tests.ops.entries.involution2d import reference
from tests.ops.geometries import drawn, pairs
from tests.ops.operators import each_device
from tests.ops.tensors import DTYPES, assert_accurate, double, gradients, random

FORMATS = (torch.contiguous_format, torch.channels_last)


def draw(image, groups, kernel, output_size, dtype, device, formats):
    """Return x and the weight, a view of [N, G·kH·kW, Ho, Wo], in their memory formats."""
    n, *_ = image
    kernels = random((n, groups * kernel[0] * kernel[1], *output_size), dtype, device, seed=2)
    weight = kernels.contiguous(memory_format=formats[1]).view(n, groups, *kernel, *output_size)
    x = random(image, dtype, device, seed=1).contiguous(memory_format=formats[0])
    return [x.requires_grad_(), weight.requires_grad_()]


@each_device
@drawn(60)
@given(
    groups=st.integers(1, 3),
    group_channels=st.integers(1, 20),
    size=pairs(1, 24) | st.tuples(st.integers(1, 4), st.integers(20, 70)),
    kernel=st.sampled_from([(3, 3), (5, 5), (7, 7)]) | pairs(1, 6),
    stride=st.just((1, 1)) | pairs(1, 3),
    padding=pairs(0, 3) | pairs(0, 9),
    dilation=st.just((1, 1)) | pairs(1, 3),
    dtype=st.sampled_from(DTYPES),
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
)
@example(2, 16, (17, 40), (7, 7), (1, 1), (3, 3), (1, 1), torch.float32, FORMATS[:1] * 2)
@example(2, 16, (17, 40), (7, 7), (1, 1), (3, 3), (1, 1), torch.float32, FORMATS[1:] * 2)
@example(1, 40, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1), torch.bfloat16, FORMATS[:1] * 2)
@example(2, 16, (17, 40), (7, 7), (2, 2), (3, 3), (1, 1), torch.float32, FORMATS[:1] * 2)
@example(2, 20, (18, 39), (5, 5), (2, 2), (2, 2), (1, 1), torch.bfloat16, FORMATS[1:] * 2)
@example(1, 4, (9, 9), (3, 2), (9, 40), (30, 100), (1, 1), torch.float32, FORMATS[:1] * 2)
@example(2, 16, (17, 40), (7, 7), (1, 1), (3, 3), (1, 1), torch.bfloat16, FORMATS[1:] * 2)
@example(3, 2, (140, 260), (3, 3), (2, 2), (1, 1), (1, 1), torch.bfloat16, FORMATS[:1] * 2)
@example(70, 5, (7, 7), (7, 7), (1, 1), (3, 3), (1, 1), torch.bfloat16, FORMATS[:1] * 2)
@example(70, 5, (7, 9), (3, 3), (1, 1), (1, 1), (1, 1), torch.float32, FORMATS[:1] * 2)
def test_matches_unfolded(
    device, groups, group_channels, size, kernel, stride, padding, dilation, dtype, formats
):
    output_size = []
    for side, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
        assume(side + 2 * p >= d * (k - 1) + 1)
        output_size.append((side + 2 * p - d * (k - 1) - 1) // s + 1)
    image = (2, groups * group_channels, *size)
    tensors = draw(image, groups, kernel, output_size, dtype, device, formats)
    exact = double(tensors)
    actual = involution2d(*tensors, stride, padding, dilation)
    expected = reference(*exact, stride, padding, dilation)
    assert_accurate(actual, expected, dtype)
    grad = random(expected.shape, dtype, device, seed=3)
    pairs_of_gradients = zip(
        gradients(actual, tensors, [grad]), gradients(expected, exact, double([grad])), strict=True
    )
    for x, (a, e) in zip(tensors, pairs_of_gradients, strict=True):
        assert_accurate(a, e, dtype, terms=group_channels)
        assert a.stride() == x.stride()


@each_device
@pytest.mark.parametrize("x_format", FORMATS, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_copies_nothing(device, x_format, weight_format):
    tensors = draw(
        (2, 8, 9, 10), 2, (3, 3), (9, 10), torch.float32, device, (x_format, weight_format)
    )
    grad = torch.ones(2, 8, 9, 10, device=device).contiguous(memory_format=x_format)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        involution2d(*tensors, padding=1).backward(grad)
    names = {event.name for event in seen.events()}
    assert any("involution2d_backward" in name for name in names)
    assert not names & {"aten::copy_", "aten::clone"}


@pytest.mark.parametrize("stride", [1, 2, (3, 1)])
@pytest.mark.parametrize("kernel_size", [3, (5, 1)])
def test_layer_has_the_output_size_of_conv2d(stride, kernel_size):
    layer = Involution2d(8, kernel_size, stride, group_channels=4)
    padding = layer.padding
    conv = torch.nn.Conv2d(8, 8, kernel_size, stride, padding)
    for height, width in ((8, 9), (7, 12), (1, 5)):
        x = torch.randn(2, 8, height, width)
        assert layer(x).shape == conv(x).shape


def test_layer_keeps_channels_last():
    layer = Involution2d(8, 3, group_channels=4).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 5).contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    weight = layer.make_weight(x)
    assert weight.permute(0, 4, 5, 1, 2, 3).is_contiguous()
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def test_all_parameters_have_gradients():
    layer = Involution2d(8, 3, group_channels=2, reduction_ratio=2)
    layer(torch.randn(2, 8, 6, 5)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


def test_repr():
    assert repr(Involution2d(32, 7, 2)).startswith(
        "Involution2d(\n  32, kernel_size=(7, 7), stride=(2, 2), group_channels=16, "
        "reduction_ratio=4\n"
    )


@pytest.mark.parametrize(
    ("arguments", "raises", "says"),
    [
        ((0, 3), ValueError, ("channels", "at least 1", "0")),
        ((16.0, 3), TypeError, ("channels", "int", "float")),
        ((16, 0), ValueError, ("kernel_size", "at least 1", "0")),
        ((16, 4), ValueError, ("kernel_size", "odd", "4")),
        ((16, "same"), TypeError, ("kernel_size", "pair", "'same'")),
        ((16, 3, 0), ValueError, ("stride", "at least 1", "0")),
        ((24, 3), ValueError, ("group_channels", "divide", "24", "16")),
        ((16, 3, 1, 0), ValueError, ("group_channels", "at least 1", "0")),
        ((16, 3, 1, 16, 0), ValueError, ("reduction_ratio", "at least 1", "0")),
    ],
)
def test_constructor(arguments, raises, says):
    with pytest.raises(raises) as raised:
        Involution2d(*arguments)
    for words in ("Involution2d", *says):
        assert words in str(raised.value)


def test_input_of_wrong_shape_raises():
    layer = Involution2d(16, 3)
    for x in (torch.ones(2, 8, 5, 5), torch.ones(16, 5, 5)):
        with pytest.raises(RuntimeError, match=r"Involution2d: input .* \[N, 16, H, W\], got \["):
            layer(x)
