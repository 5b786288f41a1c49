"""convert_batch_norm: training, fused activations, layers of torchvision and timm."""

import copy

import pytest
import torch
from torch import nn

from ops import convert_batch_norm
from ops.batch_norm_act2d import ACTIVATIONS
from tests.ops.tensors import Recorder
from tests.ops.test_batch_norm_act2d import image
from tests.ops.test_convert import SIDE, calls, network

NORMS = {"mobilenet_v3_small": 34, "mobilenet_v2": 52, "efficientnet_b0": 49}


@pytest.mark.parametrize(("name", "count"), NORMS.items())
def test_networks_train_alike(name, count):
    before = network(name).double().train()
    after = copy.deepcopy(before)
    assert convert_batch_norm(after) == count
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


def computed(model, x):
    """Return the activations that our operator computes."""
    with Recorder() as recorder:
        model(x)
    return [list(ACTIVATIONS)[call.args[3]] for call in recorder.calls]


def test_activation_is_computed_with_the_layer_in_training():
    layers = [nn.BatchNorm2d(3), nn.ReLU6(), nn.BatchNorm2d(3), nn.ELU(), nn.BatchNorm2d(3)]
    model = nn.Sequential(*layers)
    x = image((2, 3, 4, 4))
    assert convert_batch_norm(model) == 3
    assert computed(model, x) == ["relu6", "identity", "identity"]
    assert convert_batch_norm(model) == 0
    layers[0].eval()
    assert computed(model, x) == ["identity", "identity"]
    assert computed(model[2:], x) == ["identity", "identity"]
    assert computed(model.eval(), x) == []
    assert list(model) == layers


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
    assert calls(after.train(), x) == 1
    after[0].act.register_forward_hook(lambda module, args, output: output * 2)
    before[0].act.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(after(x), before.train()(x), rtol=1e-4, atol=1e-5)


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
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


def hooked_in_backward(layer):
    layer.register_full_backward_hook(lambda *_: None)
    return layer


def replaced(layer):
    layer.forward = lambda x: x + 1
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda norm, act: [Reordered(norm, act)],
        lambda norm, act: [hooked(norm), act],
        lambda norm, act: [norm, hooked(act)],
        lambda norm, act: [hooked_in_backward(norm), act],
        lambda norm, act: [norm, replaced(act)],
        lambda norm, act: [norm, nn.Conv2d(3, 3, 1), act],
    ],
    ids=[
        "order",
        "hook of norm",
        "hook of activation",
        "backward hook",
        "forward of activation",
        "apart",
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after conversion"])
def test_activation_that_is_used_otherwise_stays(make, late):
    """Hooks and other changes also count if they come after the conversion."""
    models = []
    for converted in (True, False):
        torch.manual_seed(0)
        norm, act = nn.BatchNorm2d(3), nn.SiLU()
        model = nn.Sequential(norm, act)
        if late and converted:
            assert convert_batch_norm(model) == 1
        model = nn.Sequential(*make(norm, act))
        if not late and converted:
            assert convert_batch_norm(model) == 1
        models.append(model)
    x = image((2, 3, 4, 4))
    assert computed(models[0], x) == ["identity"]
    torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-4, atol=1e-4)


def test_layer_that_occurs_twice():
    norm = nn.BatchNorm2d(3)
    before = nn.Sequential(norm, nn.SiLU(), norm, nn.Hardswish(), norm)
    after = copy.deepcopy(before)
    assert convert_batch_norm(after) == 1
    x = image((2, 3, 4, 4))
    torch.testing.assert_close(after(x), before(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.state_dict(), before.state_dict())
    assert computed(after, x) == ["silu", "hardswish", "identity"]


def test_global_hooks_see_the_activation():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.SiLU())
    convert_batch_norm(model)
    seen = []
    hook = lambda module, args, output: seen.append(type(module))  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(hook)
    model(image((2, 3, 4, 4)))
    handle.remove()
    assert seen == [nn.BatchNorm2d, nn.SiLU, nn.Sequential]


class Subclass(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "make", [lambda: Subclass(3), lambda: nn.SyncBatchNorm(3), lambda: nn.BatchNorm1d(3)]
)
def test_other_layers_are_not_converted(make):
    model = nn.Sequential(make(), nn.ReLU())
    assert convert_batch_norm(model) == 0
    assert type(model[1]) is nn.ReLU


def test_converted_network_exports_to_standard_operators():
    pytest.importorskip("onnxscript")
    from ops.export import export_onnx

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()).eval()
    convert_batch_norm(model)
    exported = export_onnx(model, (torch.ones(2, 3, 8, 8),))
    assert {node.domain for node in exported.graph.node} == {""}
