"""Modules: outputs, copies, state dicts, tracing, interchange with torch.nn."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ops
from ops import (
    GELU,
    LLTM,
    BatchNormAct2d,
    DepthwiseConv1d,
    DepthwiseConv2d,
    LLTMCell,
    MaxPool2d,
    NCReLU,
)
from tests.ops.operators import OPERATORS, each_operator
from tests.ops.tensors import as_tuple, inputs, join, split

each_peer = pytest.mark.parametrize("op", [op for op in OPERATORS if op.peer], ids=str)


def typical_input(op):
    return inputs(op.cases[0], torch.float32)[0]


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        *((ops.DepthwiseConv2d, it) for it in ((0, 3), (4, 0), (4, 3, 0), (4, 3, 1, -1))),
        *((ops.DepthwiseConv1d, it) for it in ((0, 3), (4, 0), (4, 3, 0), (4, 3, 1, -1))),
        *((ops.Involution2d, it) for it in ((0, 3), (16, 0), (16, 3, 0))),
        *((ops.MaxPool2d, it) for it in ((0,), (2, 0), (2, 2, -1))),
    ],
)
def test_value_out_of_range_is_a_value_error(layer, arguments):
    with pytest.raises(ValueError, match=rf"^{layer.__name__}: \w+ must be at least [01], got "):
        layer(*arguments)


def assert_equal(actual, expected):
    for a, e in zip(as_tuple(actual), as_tuple(expected), strict=True):
        assert torch.equal(a, e)


@each_operator
def test_applies_the_function(op):
    module, tensors = op.module(), inputs(op.cases[0], torch.float32)
    (x, *state), parameters = split(op, tensors)
    if op.module_reference:
        assert_equal(module(x), op.module_reference(module, x))
        return
    held = list(module.parameters())
    assert [p.shape for p in held] == [p.shape for p in parameters]
    actual = module(x, tuple(state)) if state else module(x)
    assert_equal(actual, op.function(*join([x, *state], held), **op.cases[0].kwargs))


@each_operator
def test_symbolic_tracing(op):
    """Expect one node of torch.fx: the function, or a layer that has a mode or branches."""
    layer, x = op.module(), typical_input(op)
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    nodes = list(traced.graph.nodes)
    if isinstance(layer, (BatchNormAct2d, LLTM, LLTMCell)):
        assert [node.target for node in nodes if node.op == "call_module"] == ["0"]
        with pytest.raises(TypeError, match=f"{type(layer).__name__}: torch.fx cannot trace this"):
            torch.fx.symbolic_trace(layer)
    else:
        calls = [node.target for node in nodes if node.op == "call_function"]
        assert op.function.__module__ in {function.__module__ for function in calls}
    for training in (True, False):
        assert_equal(traced.train(training)(x), layer.train(training)(x))
    with pytest.raises(TypeError, match="input must be Tensor, not int"):
        traced(3)


@each_operator
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(op, clone):
    module, x = op.module(), typical_input(op)
    expected = module(x)
    other = clone(module)
    assert repr(other) == repr(module)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    assert_equal(other(x), expected)


@each_operator
def test_state_dict_round_trip(op):
    module, other, x = op.module(), op.module(), typical_input(op)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_equal(other(x), module(x))


@each_operator
def test_dtype_and_device(op):
    x = typical_input(op)
    assert {y.dtype for y in as_tuple(op.module(dtype=torch.float64)(x.double()))} == {
        torch.float64
    }
    assert {y.dtype for y in as_tuple(op.module().bfloat16()(x.bfloat16()))} == {torch.bfloat16}
    assert all(y.is_meta for y in as_tuple(op.module(device="meta")(x.to("meta"))))


def test_skip_init():
    for layer in (
        nn.utils.skip_init(BatchNormAct2d, 3, activation="silu"),
        nn.utils.skip_init(DepthwiseConv1d, 3, 5, padding="causal"),
        nn.utils.skip_init(DepthwiseConv2d, 3, 5),
        nn.utils.skip_init(LLTM, 3, 4),
    ):
        assert all(x.device.type == "cpu" for x in layer.state_dict().values())


@each_operator
def test_is_public(op):
    assert op.name in ops.__all__
    assert type(op.module()).__name__ in ops.__all__


@each_peer
def test_state_dict_interchange(op):
    module, peer, x = op.module(), op.peer(), typical_input(op)
    peer.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), peer(x))
    nn.init.ones_(peer.weight)
    module.load_state_dict(peer.state_dict())
    torch.testing.assert_close(module(x), peer(x))


@each_peer
def test_same_seed_same_initial_weights(op):
    torch.manual_seed(5)
    module = op.module()
    torch.manual_seed(5)
    peer = op.peer()
    for (name, ours), (peer_name, theirs) in zip(
        module.named_parameters(), peer.named_parameters(), strict=True
    ):
        assert name == peer_name
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("layer", "base"),
    [(DepthwiseConv2d(4, 3), nn.Conv2d), (MaxPool2d(2), nn.MaxPool2d)],
)
def test_layers_are_instances_of_the_built_in_ones(layer, base):
    """Functions that select layers by type, such as initialisation, find them."""
    assert isinstance(layer, base)


def test_repr():
    assert repr(GELU()) == "GELU()"
    assert repr(NCReLU(dim=2)) == "NCReLU(dim=2)"
    with pytest.raises(TypeError, match="NCReLU: dim must be int, not float"):
        NCReLU(1.0)
    assert repr(DepthwiseConv2d(3, 5, padding=(2, 1), bias=False)) == (
        "DepthwiseConv2d(3, 3, kernel_size=(5, 5), stride=(1, 1), padding=(2, 1), groups=3, "
        "bias=False)"
    )


@pytest.mark.parametrize(
    ("arguments", "raises", "says"),
    [
        ((0, 3), ValueError, ("channels", "at least 1", "0")),
        ((3, 0), ValueError, ("kernel_size", "at least 1", "0")),
        ((3, 3, 0), ValueError, ("stride", "at least 1", "0")),
        ((3, 3, 1, -1), ValueError, ("padding", "at least 0", "-1")),
        ((3, "same"), TypeError, ("kernel_size", "pair", "'same'")),
        ((3.0, 3), TypeError, ("channels", "int", "float")),
    ],
)
def test_depthwise_conv2d_constructor(arguments, raises, says):
    with pytest.raises(raises) as raised:
        DepthwiseConv2d(*arguments)
    for words in ("DepthwiseConv2d", *says):
        assert words in str(raised.value)
