"""convert_batch_norm: training, fused activations, layers of torchvision and timm."""

import copy

import pytest
import torch
from torch import nn

from ops import BatchNormAct2d, convert_batch_norm
from tests.ops.test_batch_norm_act2d import image
from tests.ops.test_convert import SIDE, network

NORMS = {"mobilenet_v3_small": 34, "mobilenet_v2": 52, "efficientnet_b0": 49}


@pytest.mark.parametrize(("name", "count"), NORMS.items())
def test_networks_train_alike(name, count):
    before = network(name).double().train()
    after = copy.deepcopy(before)
    assert convert_batch_norm(after) == count
    kinds = {type(layer) for layer in after.modules()}
    assert nn.BatchNorm2d not in kinds
    assert nn.ReLU6 not in kinds
    x = torch.randn(4, 3, SIDE, SIDE, dtype=torch.float64)
    results = []
    for model in (before, after):
        torch.manual_seed(1)  # dropout, stochastic depth
        y = model(x)
        y.square().mean().backward()
        results.append((y, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(after.state_dict(), before.state_dict())
    torch.testing.assert_close(after.eval()(x), before.eval()(x))


def test_activation_becomes_part_of_the_layer():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU6(), nn.BatchNorm2d(3), nn.ELU())
    keys = list(model.state_dict())
    assert convert_batch_norm(model) == 2
    assert [type(layer).__name__ for layer in model] == [
        "BatchNormAct2d",
        "Identity",
        "BatchNormAct2d",
        "ELU",
    ]
    assert [model[0].activation, model[2].activation] == ["relu6", "identity"]
    assert list(model.state_dict()) == keys
    assert repr(model[0]).endswith("activation='relu6')")


def timm_layer(act, drop=None):
    """Return a layer with the names, attributes and result of timm's."""
    layer = nn.BatchNorm2d(3)
    layer.drop, layer.act = drop or nn.Identity(), act
    kind = type("BatchNormAct2d", (nn.BatchNorm2d,), {"__module__": "timm.layers.norm_act"})
    kind.forward = lambda self, x: self.act(self.drop(nn.BatchNorm2d.forward(self, x)))
    layer.__class__ = kind
    return layer


@pytest.mark.parametrize("act", [nn.SiLU(), nn.ReLU6(), nn.Identity()], ids=repr)
def test_layers_of_timm_are_converted(act):
    before = nn.Sequential(timm_layer(act))
    after = copy.deepcopy(before)
    assert convert_batch_norm(after) == 1
    x = image((3, 3, 4, 5))
    torch.testing.assert_close(after(x), before(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.eval()(x), before.eval()(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.state_dict(), before.state_dict())


@pytest.mark.parametrize(
    "make",
    [lambda: timm_layer(nn.ELU()), lambda: timm_layer(nn.ReLU(), nn.Dropout())],
    ids=["activation", "dropout"],
)
def test_other_layers_of_timm_stay(make):
    assert convert_batch_norm(nn.Sequential(make())) == 0


def test_network_of_timm_trains_alike():
    timm = pytest.importorskip("timm")
    before = timm.create_model("efficientnet_b0", pretrained=False).double().train()
    after = copy.deepcopy(before)
    assert convert_batch_norm(after) == 49
    x = torch.randn(4, 3, SIDE, SIDE, dtype=torch.float64)
    results = []
    for model in (before, after):
        torch.manual_seed(1)
        y = model(x)
        y.square().mean().backward()
        results.append((y, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(after.state_dict(), before.state_dict())


class Reordered(nn.Sequential):
    def forward(self, x):
        return self[0](self[1](x))


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


def test_activation_that_is_used_otherwise_stays():
    norm = nn.BatchNorm2d(3)
    for model in (
        Reordered(nn.BatchNorm2d(3), nn.ReLU()),
        nn.Sequential(hooked(nn.BatchNorm2d(3)), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), hooked(nn.ReLU())),
        nn.Sequential(norm, nn.ReLU(), norm),
    ):
        assert convert_batch_norm(model) == 1
        assert type(model[0]) is BatchNormAct2d
        assert model[0].activation == "identity"
        assert type(model[1]) is nn.ReLU


def test_layers_apart_are_not_fused():
    conv = nn.Conv2d(3, 3, 1)
    before = nn.Sequential(conv, nn.BatchNorm2d(3), conv, nn.ReLU())
    after = copy.deepcopy(before)
    assert convert_batch_norm(after) == 1
    x = image((2, 3, 4, 4))
    torch.testing.assert_close(after(x), before(x), rtol=1e-4, atol=1e-5)


class Subclass(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "make", [lambda: Subclass(3), lambda: nn.SyncBatchNorm(3), lambda: nn.BatchNorm1d(3)]
)
def test_other_layers_are_not_converted(make):
    model = nn.Sequential(make(), nn.ReLU())
    assert convert_batch_norm(model) == 0
    assert type(model[1]) is nn.ReLU


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"convert_batch_norm: module must be an nn\.Module"):
        convert_batch_norm(3)
    with pytest.raises(ValueError, match="is itself a BatchNorm2d"):
        convert_batch_norm(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="activation must be one of identity, relu"):
        BatchNormAct2d(3, "tanh")


def test_converted_network_exports_to_standard_operators():
    pytest.importorskip("onnxscript")
    from ops.export import export_onnx

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()).eval()
    convert_batch_norm(model)
    exported = export_onnx(model, (torch.ones(2, 3, 8, 8),))
    assert {node.domain for node in exported.graph.node} == {""}
