import pytest
import torch
from torch import nn

from app.config.schema import LeNetConfig, LLTMConfig, SeparableConfig
from app.models import (
    MIN_SIDE,
    OneChannelConv2d,
    build_model,
    count_parameters,
    takes_any_size,
)
from ops import GELU, DepthwiseConv2d, GlobalAvgPool2d, MaxPool2d, NCReLU
from tests.app.networks import TINY

STANDARD = (1 * 25 + 1) * 6 + (6 * 25 + 1) * 16 + 401 * 120 + 121 * 84 + 85 * 10
INVOLUTION = (
    (2 * 6 + 6 * 3 + 2 * 3 + 4 * 50)
    + (7 * 16 + 16 * 8 + 2 * 8 + 9 * 50)
    + (16 * 49 + 1) * 120
    + 121 * 84
    + 85 * 10
)
PARAMETERS = {
    ("relu", "standard"): STANDARD,
    ("gelu", "standard"): STANDARD,
    # all layers but the first have twice the input channels
    ("ncrelu", "standard"): STANDARD + 6 * 25 * 16 + 400 * 120 + 120 * 84 + 84 * 10,
    ("relu", "depthwise"): 25 + 2 * 6 + 6 * 25 + 7 * 16 + 401 * 120 + 121 * 84 + 85 * 10,
    ("gelu", "depthwise"): 25 + 2 * 6 + 6 * 25 + 7 * 16 + 401 * 120 + 121 * 84 + 85 * 10,
    # 1x1, reduce, norm, span to 2 groups of 5x5; the features are 7x7
    ("relu", "involution"): INVOLUTION,
    ("ncrelu", "depthwise"): 25 + 2 * 6 + 12 * 25 + 13 * 16 + 801 * 120 + 241 * 84 + 169 * 10,
    # 3x3 and 1x1 convolutions instead of fully connected layers
    ("relu", "standard", "gap"): 26 * 6 + (6 * 25 + 1) * 16 + (16 * 9 + 1) * 120 + 121 * 10,
    ("ncrelu", "depthwise", "gap"): 25 + 2 * 6 + 12 * 25 + 13 * 16 + 32 * 9 + 33 * 120 + 241 * 10,
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_shapes_parameters_and_gradients(kind):
    model = build_model(LeNetConfig(*kind), num_classes=10)
    logits = model(torch.randn(3, 1, 28, 28))
    assert logits.shape == (3, 10)
    assert logits.dtype == torch.float32
    assert count_parameters(model) == PARAMETERS[kind]
    logits.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("act", "conv", "operators"),
    [("gelu", "depthwise", (GELU, DepthwiseConv2d)), ("ncrelu", "standard", (NCReLU, nn.Conv2d))],
)
def test_layers_are_custom_operators(act, conv, operators):
    kinds = {type(module) for module in build_model(LeNetConfig(act, conv), 10).modules()}
    assert kinds >= set(operators)
    assert nn.ReLU not in kinds


def test_lltm_network_reads_rows():
    model = build_model(LLTMConfig(), num_classes=10)
    assert count_parameters(model) == 3 * 128 * (128 + 28 + 1) + 129 * 10
    images = torch.randn(3, 1, 28, 28)
    logits = model(images)
    assert logits.shape == (3, 10)
    logits.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    state = None
    for row in range(28):
        _, state = model.rows(images[:, 0, row : row + 1], state)
    torch.testing.assert_close(model.classifier(state[0]), logits)


@pytest.mark.parametrize(("kind", "parameters"), [(SeparableConfig(), 53_098), (TINY, 6_074)])
def test_parameters_of_separable_networks(kind, parameters):
    model = build_model(kind, num_classes=10)
    assert count_parameters(model) == parameters
    logits = model(torch.randn(3, 1, 28, 28))
    assert logits.shape == (3, 10)
    logits.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_number_of_classes():
    assert build_model(LeNetConfig(), num_classes=3)(torch.zeros(2, 1, 28, 28)).shape == (2, 3)


@pytest.mark.parametrize("kind", [LeNetConfig(head="gap"), SeparableConfig()], ids=str)
def test_global_pooling_accepts_any_size(kind):
    assert takes_any_size(kind)
    pooling = build_model(kind, num_classes=3)
    assert any(isinstance(module, GlobalAvgPool2d) for module in pooling.modules())
    for size in ((MIN_SIDE, MIN_SIDE), (13, 40), (28, 28)):
        assert pooling(torch.randn(2, 1, *size)).shape == (2, 3)
    for model, side in ((pooling, MIN_SIDE - 1), (build_model(LeNetConfig(), 3), 40)):
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 1, side, side))


def test_max_pool_commutes_with_ncrelu():
    input = torch.randn(4, 6, 8, 8)
    pool, ncrelu = MaxPool2d(2), NCReLU()
    torch.testing.assert_close(ncrelu(pool(input)), pool(ncrelu(input)), rtol=0, atol=0)


def test_frozen_parameters_are_not_counted():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert count_parameters(layer) == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_one_channel_conv2d_matches_conv2d(device):
    ours = OneChannelConv2d(1, 6, 5, padding=2).double().to(device)
    input = torch.randn(3, 1, 28, 28, dtype=torch.float64, device=device)
    results = []
    for training in (True, False):
        output = ours.train(training)(input)
        results.append((output, *torch.autograd.grad(output.square().sum(), ours.parameters())))
    torch.testing.assert_close(*results)
