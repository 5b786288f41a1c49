"""convert_depthwise and restore: torchvision's models, single layers."""

import copy
import pickle
import time
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ops import convert_batch_norm, convert_depthwise, restore
from tests.ops.operators import each_device
from tests.ops.tensors import Recorder

NETWORKS = {
    "mobilenet_v3_small": 11,
    "mobilenet_v2": 17,
    "efficientnet_b0": 16,
    "convnext_tiny": 18,
}
each_network = pytest.mark.parametrize(("name", "count"), NETWORKS.items())
SIDE = 32  # height and width of the images


@cache
def original(name):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None, num_classes=5).eval()
    for parameter in model.parameters():  # ConvNeXt's initial layer scale of 1e-6 hides the blocks
        if parameter.dim() == 3:
            nn.init.normal_(parameter)
    return model


def network(name):
    return copy.deepcopy(original(name))  # copied faster than drawn


def calls(model, x):
    """Return the number of calls of our operators."""
    with Recorder() as recorder:
        model(x)
    return len(recorder.calls)


@each_network
def test_networks_have_equal_outputs_and_gradients(name, count):
    before = network(name).double()
    after = copy.deepcopy(before)
    assert convert_depthwise(after) == count
    x = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    assert calls(after, x) == count
    expected, result = before(x), after(x)
    torch.testing.assert_close(result, expected)
    expected.square().mean().backward()
    result.square().mean().backward()
    for (key, ours), (same, theirs) in zip(
        after.named_parameters(), before.named_parameters(), strict=True
    ):
        assert key == same
        torch.testing.assert_close(
            ours.grad, theirs.grad, msg=lambda text, key=key: f"{key} {text}"
        )
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.mul_(0.9)
    before.load_state_dict(after.state_dict())
    torch.testing.assert_close(before(x), after(x))
    after.load_state_dict(before.state_dict())


def step_time(model, x):
    """Return the processor time of forward and backward, with one thread."""
    start = time.thread_time()
    model(x).square().mean().backward()
    return time.thread_time() - start


@pytest.mark.exhaustive
@each_network
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_networks_are_not_slower(name, count, memory_format):
    before = network(name).to(memory_format=memory_format).train()
    after = copy.deepcopy(before)
    convert_depthwise(after)
    x = torch.randn(4, 3, 64, 64).to(memory_format=memory_format)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [(step_time(before, x), step_time(after, x)) for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    theirs, ours = (min(column) for column in zip(*times, strict=True))
    assert ours < 1.1 * theirs  # margin for noise


def some(quick, *values):
    """Return `values` as parameters; those not in `quick` only run with --exhaustive."""
    return [
        pytest.param(*value, marks=[] if value in quick else pytest.mark.exhaustive)
        for value in values
    ]


@pytest.mark.parametrize("name", some([("convnext_tiny",)], *((name,) for name in NETWORKS)))
def test_networks_compile_to_one_graph(name):
    model = network(name)
    convert_depthwise(model)
    x = torch.randn(1, 3, SIDE, SIDE)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("name", "exporter"),
    some(
        [("mobilenet_v3_small", "symbolic")],  # test_export.py covers dynamo
        *((name, exporter) for name in NETWORKS for exporter in ("symbolic", "dynamo")),
    ),
)
def test_networks_export_as_the_original(name, exporter):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from ops.export import export_onnx

    model = network(name)
    convert_depthwise(model)
    x = torch.randn(2, 3, SIDE, SIDE)
    exported = export_onnx(model, (x,), exporter=exporter, dynamic_axes={"input": {0: "batch"}})
    onnx.checker.check_model(exported, full_check=True)
    assert not exported.functions
    session = onnxruntime.InferenceSession(
        exported.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (result,) = session.run(None, {"input": x.numpy()})
    np.testing.assert_allclose(result, model(x).detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.Conv2d, 4, 4, (3, 5), (2, 1), (1, 2), (1, 2), groups=4),
        partial(nn.Conv2d, 4, 4, 3, groups=4, bias=False),
        partial(nn.Conv2d, 4, 4, 3, groups=4, padding="valid"),
        partial(nn.Conv2d, 4, 4, (3, 5), groups=4, padding="same", dilation=(2, 1)),
        partial(nn.Conv2d, 4, 4, (2, 4), groups=4, padding="same", dilation=2),
        partial(nn.Conv2d, 4, 4, 3, groups=4, padding_mode="reflect"),  # with padding=0
        lambda: nn.utils.weight_norm(nn.Conv2d(4, 4, 3, groups=4)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_are_converted(make):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(make()))
    before, after = models
    assert convert_depthwise(after) == 1
    assert convert_depthwise(after) == 0
    x = torch.randn(2, 4, 9, 11, requires_grad=True)
    assert calls(after, x) == 1
    expected, result = before(x), after(x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, [x, *before.parameters()], seed)
    ours = torch.autograd.grad(result, [x, *after.parameters()], seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if after[0].weight.is_leaf:  # weight_norm's weight cannot be copied
        for again in (copy.deepcopy(after), pickle.loads(pickle.dumps(after))):
            nn.init.zeros_(after[0].weight)
            torch.testing.assert_close(again(x), result)
            assert calls(again, x) == 1


SEQUENCES = [
    partial(nn.Conv1d, 4, 4, 3, 2, 2, 2, groups=4),
    partial(nn.Conv1d, 4, 4, 3, groups=4, bias=False),
    partial(nn.Conv1d, 4, 4, 4, groups=4, padding="same", dilation=3),
    partial(nn.Conv1d, 4, 4, 4, groups=4, padding="valid", padding_mode="circular"),
]


@pytest.mark.parametrize("make", SEQUENCES)
@pytest.mark.parametrize("act", [nn.SiLU(), nn.SiLU(inplace=True), nn.ReLU(), nn.Identity()])
def test_sequences_are_converted_and_silu_is_fused(make, act):
    before = nn.Sequential(nn.Conv1d(4, 4, 1), make(), act, make())
    after = copy.deepcopy(before)
    assert convert_depthwise(after) == 2
    x = torch.randn(2, 4, 19, requires_grad=True)
    fused = type(act) is nn.SiLU
    with Recorder() as recorder:
        result = after(x)
    assert [call.args[-1] for call in recorder.calls] == [fused, False]
    expected = before(x)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    seed = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, [x, *before.parameters()], seed)
    ours = torch.autograd.grad(result, [x, *after.parameters()], seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after(x[0]), before(x[0]))
    compiled = torch.compile(after, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    exported = str(torch.export.export(after, (x,)).graph)
    assert exported.count("aten.conv1d") == 3
    assert "lenet_ops" not in exported
    layers = list(after)
    assert restore(after) == 2
    assert calls(after, x) == 0
    assert [type(layer) for layer in layers] == [type(layer) for layer in before]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after conversion"])
@pytest.mark.parametrize("hooked", [0, 1], ids=["convolution", "SiLU"])
def test_silu_beside_a_hook_is_not_fused(hooked, late):
    model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.SiLU())
    expected = []
    for convert in (False, True):
        if convert and late:
            convert_depthwise(model)
        handle = model[hooked].register_forward_hook(lambda module, args, output: output * 2)
        if convert and not late:
            convert_depthwise(model)
        x = torch.ones(1, 4, 9)
        with Recorder() as recorder:
            expected.append(model(x))
        handle.remove()
    assert [call.args[-1] for call in recorder.calls] == [False]
    torch.testing.assert_close(*expected)


def test_batch_norm_and_convolution_fuse_in_one_sequence():
    before = nn.Sequential(nn.Conv1d(3, 3, 3, groups=3), nn.SiLU(), nn.Unflatten(2, (2, 2)))
    before.extend([nn.BatchNorm2d(3), nn.SiLU()])
    after = copy.deepcopy(before)
    assert (convert_batch_norm(after), convert_depthwise(after)) == (1, 1)
    x = torch.randn(2, 3, 6)
    assert calls(after, x) == 2
    torch.testing.assert_close(after(x), before(x))
    assert restore(after) == 2


class Subclass(nn.Conv2d):
    pass


def replaced_forward():
    conv = nn.Conv2d(4, 4, 3, groups=4)
    conv.forward = lambda x: x
    return conv


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(4, 4, 3),
        lambda: nn.Conv2d(4, 4, 3, groups=2),
        lambda: nn.Conv2d(4, 8, 3, groups=4),
        lambda: nn.Conv2d(4, 4, 2, groups=4, padding="same"),
        lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(4, 4, 3, groups=4, dtype=torch.complex64),
        lambda: Subclass(4, 4, 3, groups=4),
        lambda: nn.LazyConv2d(4, 3, groups=4),
        lambda: nn.ConvTranspose2d(4, 4, 3, groups=4),
        lambda: nn.Conv1d(4, 4, 3, groups=4, padding="same", padding_mode="replicate"),
        lambda: nn.Conv1d(4, 4, 3, groups=2),
        lambda: nn.ConvTranspose1d(4, 4, 3, groups=4),
        lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3, groups=4)),
        replaced_forward,
    ],
)
def test_other_layers_are_not_converted(make):
    conv = make()
    model = nn.Sequential(conv)
    assert convert_depthwise(model) == 0
    assert model[0] is conv


@each_device
def test_conversion_keeps_parameters_attributes_and_hooks(device):
    conv = nn.Conv2d(4, 4, 3, groups=4, device=device, dtype=torch.float64)
    conv.weight.requires_grad_(False)
    conv.register_buffer("scale", torch.ones(1))
    conv.note = "mine"
    conv.eval()
    called = []
    conv.register_forward_pre_hook(lambda module, args: called.append("pre"))
    conv.register_forward_hook(lambda module, args, output: output * 2)
    conv.register_full_backward_hook(lambda *_: called.append("backward"))
    conv.register_state_dict_post_hook(lambda module, state, *_: called.append("state"))
    model = nn.ModuleDict({"a": nn.Sequential(conv), "b": conv, "none": None}).train()
    conv.eval()
    expected = conv(x := torch.randn(1, 4, 5, 5, device=device, dtype=torch.float64)).detach()
    called.clear()
    keys = list(model.state_dict())
    called.clear()
    assert convert_depthwise(model) == 1
    layer = model["b"]
    assert layer is model["a"][0] is conv
    assert not layer.training
    assert model.training
    assert layer.note == "mine"
    torch.testing.assert_close(layer(x), expected)
    layer(x.requires_grad_()).sum().backward()
    assert list(model.state_dict()) == keys
    assert called == ["pre", "pre", "backward", "state", "state"]
    assert conv.weight.grad is None
    assert conv.bias.grad is not None


def test_a_layer_itself_is_converted():
    conv = nn.Conv2d(4, 4, 3, groups=4)
    x = torch.randn(1, 4, 5, 5)
    assert convert_depthwise(conv) == calls(conv, x) == restore(conv) == 1
    assert calls(conv, x) == restore(conv) == 0


def test_restored_model_is_the_original():
    conv = nn.Conv2d(4, 4, 3, groups=4)
    model = nn.Sequential(nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU()), conv)
    before = [dict(vars(layer)) for layer in model.modules()]
    assert convert_depthwise(model) + convert_batch_norm(model) == 2
    assert restore(model) == 2
    assert [vars(layer) for layer in model.modules()] == before


def test_shallow_copies_are_restored():
    conv = nn.Conv2d(4, 4, 3, groups=4)
    convert_depthwise(conv)
    model = nn.Sequential(conv, copy.copy(conv))
    assert restore(model) == 2
    assert calls(model, torch.randn(1, 4, 9, 9)) == 0


def test_replicas_of_data_parallel_compute_with_their_own_parameters():
    conv = nn.Conv2d(4, 4, 3, groups=4)
    convert_depthwise(conv)
    replica = conv._replicate_for_data_parallel()
    replica.weight = torch.zeros(4, 1, 3, 3)  # as the copy on another GPU
    replica.bias = torch.ones(4)
    assert replica(torch.randn(1, 4, 5, 5)).eq(1).all()
    assert not conv(torch.randn(1, 4, 5, 5)).eq(1).all()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()).cuda()
    x = torch.randn(8, 4, 9, 9, device="cuda")
    expected = nn.DataParallel(copy.deepcopy(net))(x)
    convert_depthwise(net)
    convert_batch_norm(net)
    torch.testing.assert_close(nn.DataParallel(net)(x), expected)


def test_scripted_and_traced_children_stay():
    conv = nn.Conv2d(4, 4, 3, groups=4)
    x = torch.randn(1, 4, 5, 5)
    with pytest.warns((FutureWarning, DeprecationWarning)):  # torch.jit's, since and before 2.14
        model = nn.Sequential(torch.jit.script(conv), torch.jit.trace(conv.eval(), x), conv)
    assert convert_depthwise(model) == 1
    assert convert_batch_norm(model) == 0
    assert calls(model[2], x) == 1
    assert calls(model[:2], torch.randn(1, 4, 9, 9)) == 0


@pytest.mark.parametrize("function", [convert_batch_norm, convert_depthwise, restore])
def test_wrong_arguments(function):
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}: module must be an nn\.Module, got int$"):
        function(3)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_padding_mode_changed_after_the_conversion(kind):
    conv = kind(4, 4, 3, groups=4, padding=1)
    assert convert_depthwise(conv) == 1
    circular = kind(4, 4, 3, groups=4, padding=1, padding_mode="circular")
    circular.load_state_dict(conv.state_dict())
    conv.padding_mode = "circular"
    conv._reversed_padding_repeated_twice = circular._reversed_padding_repeated_twice
    x = torch.randn(2, 4, *[9] * (1 if kind is nn.Conv1d else 2))
    torch.testing.assert_close(conv(x), circular(x))
