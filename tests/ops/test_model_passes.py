"""Public passes over converted models: each result equals that of the same pass on the original."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.fx import symbolic_trace
from torch.fx.experimental import optimization
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from ops import convert_batch_norm, convert_depthwise, restore

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.jit
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.ao.quantization
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def convert_both(model):
    return convert_depthwise(model) + convert_batch_norm(model)


CONVERTERS = {convert_depthwise: 2, convert_batch_norm: 3, convert_both: 5}  # and layers of Net


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, groups=4),
            nn.BatchNorm2d(4),
            nn.Hardswish(),
        )
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(self.features(x))))
        return self.head(x.mean((2, 3)))


def image(seed: int = 0):
    return torch.randn(4, 3, 8, 9, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def network():
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for norm in (net.features[1], net.features[4], net.norm):
            norm.weight.normal_()
            norm.bias.normal_()
            norm.running_mean.normal_()
    net(image(9))
    return net


def each_output(model):
    """Register a hook on every layer that records its output."""
    model.outputs = []
    for layer in model.modules():
        layer.register_forward_hook(lambda *args: model.outputs.append(args[2].clone()))
    return model


def averaged(model):
    average = AveragedModel(model, use_buffers=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    average.update_parameters(model)
    update_bn([image(3), image(4)], average)
    return average


def checkpointed(model):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    return Checkpointed()


def fused_by_type(model):
    """Fuse as mmengine's and similar loops do, which select layers by isinstance."""
    model.eval()
    for parent in model.modules():
        for (name, conv), (following, norm) in pairwise(parent.named_children()):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, following, nn.Identity())
    return model


def frozen(model):
    """Freeze as timm.utils.freeze_batch_norm_2d does."""
    frozen_type = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d
    for parent in model.modules():
        for name, norm in parent.named_children():
            if isinstance(norm, nn.BatchNorm2d):
                layer = frozen_type(norm.num_features, norm.eps)
                layer.load_state_dict(norm.state_dict())
                setattr(parent, name, layer)
    return model


def functional(model):
    state = {name: 0.5 * value for name, value in model.state_dict().items()}
    return lambda x: functional_call(model, state, x)


def ensemble(model):
    parameters, buffers = stack_module_state([model, copy.deepcopy(model)])
    base = copy.deepcopy(model).to("meta")
    return lambda x: vmap(lambda *state: functional_call(base, state, x))(parameters, buffers)


def quantized(name: str, model):
    """Prepare for quantisation by torch.fx: "qat" or "ptq"."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping as qat
    from torch.ao.quantization import get_default_qconfig_mapping as ptq
    from torch.ao.quantization.quantize_fx import prepare_fx, prepare_qat_fx

    prepare, mapping = (prepare_qat_fx, qat()) if name == "qat" else (prepare_fx, ptq())
    return prepare(model, mapping, (image(),))


def quantized_to_int8(model):
    from torch.ao.quantization.quantize_fx import convert_fx

    model = quantized("ptq", model)
    model(image())
    return convert_fx(model)


def quantized_without_fx(model):
    from torch.ao.quantization import fuse_modules_qat, get_default_qat_qconfig, prepare_qat

    layers = [["features.0", "features.1", "features.2"], ["features.3", "features.4"]]
    model = fuse_modules_qat(model, [*layers, ["conv", "norm"]])
    model.qconfig = get_default_qat_qconfig()
    return prepare_qat(model)


def fused_without_fx(model):
    from torch.ao.quantization import fuse_modules

    layers = [["features.0", "features.1", "features.2"], ["features.3", "features.4"]]
    return fuse_modules(model, [*layers, ["conv", "norm"]])


def reloaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def on_layers(function: Callable[[nn.Module], Any], model):
    torch.manual_seed(2)
    for layer in list(model.modules()):
        if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d)):
            function(layer)
    return model


def renormalized(function: Callable[..., Any], remove: bool, model):
    def change(layer):
        if isinstance(layer, nn.Conv2d):
            function(layer)
            if remove:
                nn.utils.parametrize.remove_parametrizations(layer, "weight")

    return on_layers(change, model)


def pruned(remove: bool, model):
    def change(layer):
        prune.l1_unstructured(layer, "weight", 0.5)
        if remove:
            prune.remove(layer, "weight")

    return on_layers(change, model)


class Exported(nn.Module):
    """An exported program, which has no train() and eval()."""

    def __init__(self, strict, model):
        super().__init__()
        self.program = torch.export.export(model, (image(),), strict=strict).module()

    def train(self, mode=True):
        return self

    def forward(self, x):
        return self.program(x)


def taken_apart(model):
    return nn.Sequential(
        model.features[:2], model.features[2:5], *model.features[5:], model.conv, model.norm
    )


def extracted(model):
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    names = ["features.1", "features.3", "norm"]
    model = extraction.create_feature_extractor(model, names)
    return lambda x: torch.stack([y.mean() for y in model(x).values()])


class Pass(NamedTuple):
    """A pass over a model in training or evaluation, and the modes of its result."""

    apply: Callable[[Any], Any]
    training: bool = True
    modes: tuple[bool, ...] = (True, False)


def in_evaluation(apply: Callable[[Any], Any]) -> Pass:
    return Pass(apply, training=False, modes=(False,))


sync = nn.SyncBatchNorm.convert_sync_batchnorm

PASSES = {
    "checkpoint": Pass(checkpointed),
    "compile": Pass(partial(torch.compile, backend="eager", fullgraph=True)),
    "deepcopy": Pass(copy.deepcopy),
    "EMA": Pass(averaged),
    "ensemble": Pass(ensemble, modes=(True,)),
    "ensemble in evaluation": in_evaluation(ensemble),
    "export, not strict": Pass(partial(Exported, False), modes=(True,)),
    "export, strict": Pass(partial(Exported, True), modes=(True,)),
    "export in evaluation": in_evaluation(partial(Exported, False)),
    "extract features": Pass(extracted),
    "freeze": Pass(frozen),
    "functional_call": Pass(functional),
    "fuse by fx": in_evaluation(optimization.fuse),
    "fuse without fx": in_evaluation(fused_without_fx),
    "fuse by type": in_evaluation(fused_by_type),
    "hooks": Pass(each_output),
    "optimize_for_inference": in_evaluation(
        lambda model: optimization.optimize_for_inference(model, {"disable_dropout": False})
    ),
    "pickle": Pass(lambda model: pickle.loads(pickle.dumps(model))),
    "prune": Pass(partial(pruned, False)),
    "prune and remove": Pass(partial(pruned, True)),
    "PTQ by fx": in_evaluation(partial(quantized, "ptq")),
    "PTQ by fx to int8": in_evaluation(quantized_to_int8),
    "QAT by fx": Pass(partial(quantized, "qat")),
    "QAT without fx": Pass(quantized_without_fx),
    "restore": Pass(lambda model: model if restore(model) >= 0 else None),
    "save": Pass(reloaded),
    "script": Pass(torch.jit.script),
    "spectral_norm": Pass(partial(renormalized, parametrizations.spectral_norm, False)),
    "spectral_norm, removed": Pass(partial(renormalized, parametrizations.spectral_norm, True)),
    "symbolic_trace": Pass(symbolic_trace),
    "symbolic_trace in evaluation": Pass(symbolic_trace, training=False),
    "synchronise": Pass(sync),
    "take apart": Pass(taken_apart),
    "trace": Pass(lambda model: torch.jit.trace(model, image(), check_trace=False), modes=(True,)),
    "trace in evaluation": in_evaluation(lambda model: torch.jit.trace(model, image())),
    "weight_norm": Pass(partial(renormalized, parametrizations.weight_norm, False)),
    "weight_norm of hooks": Pass(partial(renormalized, nn.utils.weight_norm, False)),
}


def is_strided(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def numbers(model, modes: tuple[bool, ...]) -> list[Any]:
    """Return outputs, gradients and state, after two steps in each mode."""
    results = []
    for training in modes:
        if isinstance(model, nn.Module):
            model.train(training)
        for seed in range(2):
            output = model(image(seed))
            results.append(output.detach().clone())
            if training and output.requires_grad:
                output.square().sum().backward()
    if isinstance(model, nn.Module):
        results.append({name: x.grad for name, x in model.named_parameters()})
        state = model.state_dict()
        results.append({name: x for name, x in state.items() if is_strided(x)})
        results.append(getattr(model, "outputs", None))
    return results


@cache
def expected(name: str) -> list[Any]:
    """Return the numbers of a pass over the original model."""
    apply, training, modes = PASSES[name]
    return numbers(apply(network().train(training)), modes)


@pytest.mark.parametrize(
    "converter",
    [
        convert_both,
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in CONVERTERS if x != convert_both),
    ],
)
@pytest.mark.parametrize("name", PASSES)
def test_pass_over_converted_model(name, converter):
    apply, training, modes = PASSES[name]
    model = network().train(training)
    assert converter(model) == CONVERTERS[converter]
    torch.testing.assert_close(numbers(apply(model), modes), expected(name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PASSES)
def test_conversion_after_pass(name):
    apply, training, modes = PASSES[name]
    model = apply(network().train(training))
    if isinstance(model, nn.Module):
        convert_both(model)
        torch.testing.assert_close(numbers(model, modes), expected(name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("converter", CONVERTERS)
def test_synchronisation(converter):
    """Expect SyncBatchNorm layers; without a process group they equal BatchNorm2d."""
    model = network()
    converter(model)
    model = sync(model)
    kinds = [type(layer) for layer in model.modules() if "Norm" in type(layer).__name__]
    assert kinds == [nn.SyncBatchNorm] * 3
    assert converter(model) == 0


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_exported_graph_is_that_of_the_original(strict, training):
    """Quantisation (PT2E) and move_exported_model_to_eval look for PyTorch's operators in it."""
    model = network().train(training)
    expected = torch.export.export(model, (image(),), strict=strict).graph_module.code
    convert_both(model)
    assert torch.export.export(model, (image(),), strict=strict).graph_module.code == expected


def test_traced_graph_has_no_operator_of_ours():
    model = network()
    convert_both(model)
    for training in (True, False):
        traced = torch.jit.trace(model.train(training), image(), check_trace=False)
        assert "lenet_ops" not in str(traced.inlined_graph)
