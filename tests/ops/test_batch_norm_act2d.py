"""batch_norm_act2d beside F.batch_norm: running statistics, precision."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.fx.experimental import optimization

from ops import BatchNormAct2d, batch_norm_act2d
from ops.batch_norm_act2d import ACTIVATIONS
from tests.ops.operators import each_device
from tests.ops.tensors import Recorder
from tests.ops.test_model_passes import fused_by_type

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_layout = pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=str
)


def image(shape, dtype=torch.float32, device="cpu", layout=torch.contiguous_format):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 + 3
    return x.to(device, dtype).to(memory_format=layout)


class Activation(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x):
        return self.function(x)


def layers(channels, activation, device="cpu", dtype=torch.float32, **options):
    """Return a BatchNormAct2d, and nn.BatchNorm2d with the same state."""
    torch.manual_seed(0)
    ours = BatchNormAct2d(channels, activation, **options)
    if ours.affine:
        nn.init.normal_(ours.weight)
        nn.init.normal_(ours.bias)
    theirs = nn.BatchNorm2d(channels, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours.to(device, dtype), theirs.to(device, dtype)


@each_device
@each_layout
@each_activation
@pytest.mark.parametrize(
    "shape",
    [
        (3, 5, 4, 6),
        (2, 24, 7, 7),
        (4, 70, 9, 8),  # several groups of channels
        (40, 3, 40, 40),  # several chunks, on CPU and CUDA
        (1, 2, 210, 200),  # planes in pieces
        (2, 1100, 3, 2),
        (3, 5000, 1, 2),  # several groups of channels in NHWC
        (3, 4, 1, 1),
    ],
)
def test_equals_batch_norm(shape, activation, layout, device):
    ours, theirs = layers(shape[1], activation, device)
    x = image(shape, device=device, layout=layout).requires_grad_()
    for training in (True, True, False):
        ours.train(training)
        theirs.train(training)
        z, actual = theirs(x), ours(x)
        expected = ACTIVATIONS[activation](z)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        at_bound = sum((z - bound).abs() < 1e-4 for bound in (-3, 0, 3, 6))  # rounding decides
        grad = torch.randn_like(z).masked_fill(at_bound > 0, 0)
        inputs = [[x, *layer.parameters()] for layer in (ours, theirs)]
        torch.testing.assert_close(
            torch.autograd.grad(actual, inputs[0], grad),
            torch.autograd.grad(expected, inputs[1], grad),
            rtol=1e-3,
            atol=1e-3,
        )
    for (name, a), e in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, e, msg=lambda text, name=name: f"{name} {text}")


@each_device
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_options_of_batch_norm(options, device):
    ours, theirs = layers(4, "identity", device, **options)
    for step in range(3):
        x = image((3, 4, 5, 6), device=device) + step
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


@each_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_running_statistics_of_other_dtypes(dtype, device):
    ours, theirs = layers(4, "identity", device, dtype)
    x = image((3, 4, 5, 6), dtype, device)
    ours(x)
    theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@each_device
@each_layout
@pytest.mark.parametrize("shape", [(8, 6, 20, 20), (32, 3, 100, 100), (1, 5, 512, 512)], ids=str)
@pytest.mark.parametrize("first", [1000, 1e6])
def test_variance_beside_a_large_mean_or_first_pixel(first, shape, layout, device):
    x = (image(shape, torch.float64, device, layout) + 1000).float()
    x[0, :, 0, 0] = first
    variance = torch.ones(shape[1], device=device)
    batch_norm_act2d(x, variance.clone(), variance, training=True, momentum=1.0)
    torch.testing.assert_close(variance.double(), x.double().var((0, 2, 3)), rtol=1e-5, atol=0)


@each_device
@each_layout
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (2, 8, 64, 64), (1, 2, 512, 512)], ids=str)
@pytest.mark.parametrize("scale", [1e16, 1e20, 1e30, 1e36, 8e37, float("inf"), float("nan")])
def test_huge_and_non_finite_inputs(scale, shape, activation, layout, device):
    """Expect the results of PyTorch on the CPU, but NaN only for non-finite inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator).mul(4).sub(1)
    if math.isfinite(scale):
        x *= scale
    else:
        x[:, 0, 1, 1:3] = scale
    ours, _ = layers(shape[1], activation, device)
    _, theirs = layers(shape[1], activation, "cpu")
    stock = nn.Sequential(theirs, Activation(activation))
    grad = torch.rand(shape, generator=generator)
    results = []
    for layer, image in ((ours, x.to(device).to(memory_format=layout)), (stock, x)):
        image = image.clone().requires_grad_()
        y = layer(image)
        tensors = [image, *layer.parameters()]
        gradients = torch.autograd.grad(y, tensors, grad.to(y.device))
        results.append([tensor.cpu() for tensor in (y, *gradients, *layer.buffers())])
    for actual, expected in zip(*results, strict=True):
        if math.isfinite(scale):
            assert not actual.isnan().any()
            expected = torch.where(expected.isnan(), actual, expected)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


@each_device
def test_backward_without_gradient_of_the_input(device):
    ours, theirs = layers(5, "relu", device)
    x = image((3, 5, 4, 4), device=device)
    ours(x).square().sum().backward()
    F.relu(theirs(x)).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-4, atol=1e-4)


@each_device
def test_empty_batch(device):
    ours, theirs = layers(4, "relu", device)
    x = torch.ones(0, 4, 3, 3, device=device, requires_grad=True)
    for layer in (ours, theirs):
        layer(x).sum().backward()
    assert ours.weight.grad.tolist() == ours.bias.grad.tolist() == [0] * 4
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@each_device
@each_activation
def test_gradient_at_the_bounds_of_an_activation(activation, device):
    """Compare z = -3, 0, 3 and 6 exactly, in planes larger than a vector."""
    x = torch.randn(2, 4, 5, 5, device=device)
    bias = torch.tensor([-3.0, 0.0, 3.0, 6.0], device=device, requires_grad=True)
    grads = []
    for function in (batch_norm_act2d, F.batch_norm):
        y = function(
            x,
            None,
            None,
            torch.zeros(4, device=device),
            bias,
            training=True,
            **({"activation": activation} if function is batch_norm_act2d else {}),
        )
        y = y if function is batch_norm_act2d else ACTIVATIONS[activation](y)
        grads.append(torch.autograd.grad(y.sum(), bias)[0])
    torch.testing.assert_close(*grads)


@each_device
def test_momentum_of_1_forgets_the_running_statistics(device):
    ours, theirs = layers(4, "relu", device, momentum=1.0)
    for layer in (ours, theirs):
        layer.running_mean.fill_(1e10)
        layer.running_var.fill_(1e10)
        layer(image((3, 4, 5, 6), device=device))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_running_statistics_that_require_grad_raise(name):
    stats = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    stats[name].requires_grad_()
    x = image((2, 3, 4, 4)).requires_grad_()
    with pytest.raises(RuntimeError, match=f"not differentiable .* argument '{name}'"):
        batch_norm_act2d(x, **stats, training=True)


@pytest.mark.parametrize(
    ("arguments", "raises", "says"),
    [
        ({"running_mean": 1, "running_var": 1}, TypeError, "running_mean must be Tensor, not int"),
        ({"running_mean": torch.ones(3)}, ValueError, "running_mean and running_var must both .*"),
        ({"running_var": torch.ones(3)}, ValueError, "running_mean and running_var must both .*"),
        ({"training": "relu"}, TypeError, "training must be bool, not str"),
        *(
            (
                {"activation": value},
                error,
                'activation must be one of None, "relu", "relu6", "silu", "hardswish", got .+',
            )
            for value, error in ((["relu"], TypeError), (1, TypeError), ("elu", ValueError))
        ),
        ({"momentum": None}, TypeError, "momentum must be float, not NoneType"),
        ({"eps": "a"}, TypeError, "eps must be float, not str"),
        ({"eps": -1.0}, ValueError, "eps must be at least 0, got -1"),
    ],
)
def test_wrong_settings(arguments, raises, says):
    settings = {"running_mean": None, "running_var": None, "training": True} | arguments
    with pytest.raises(raises, match=f"^batch_norm_act2d: {says}$"):
        batch_norm_act2d(image((2, 3, 4, 4)), **settings)


@pytest.mark.parametrize("training", [True, False])
def test_activation_none_is_batch_normalisation(training):
    _, theirs = layers(4, "identity")
    ours = BatchNormAct2d(4, None).train(training)
    ours.load_state_dict(theirs.state_dict())
    theirs.train(training)
    x = image((2, 4, 3, 3))
    settings = (ours.weight, ours.bias, training)
    running = ours.running_mean.clone(), ours.running_var.clone()
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected)
    actual = batch_norm_act2d(x, *running, *settings, activation=None)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.export.export(ours, (x,)).module()(x), expected)


def test_other_channels_than_those_of_the_layer_raise():
    layer, x = BatchNormAct2d(3), image((2, 4, 5, 5))
    with pytest.raises(
        RuntimeError, match=r"^batch_norm_act2d: weight .* of input \[2, 4, 5, 5\],"
    ):
        layer(x)
    with pytest.raises(RuntimeError, match=r"^batch_norm_act2d: running_mean and running_var are"):
        batch_norm_act2d(x, None, None)


def test_stopped_tracking_keeps_the_count():
    ours, theirs = layers(4, "relu")
    for layer in (ours, theirs):
        layer.track_running_stats = False
        layer(image((2, 4, 3, 3)))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@each_device
@each_activation
def test_compile_updates_running_statistics(activation, device):
    torch._dynamo.reset()
    ours, _ = layers(4, activation, device)
    again = copy.deepcopy(ours)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    x = image((3, 4, 5, 6), device=device).requires_grad_()
    for _ in range(2):
        torch.testing.assert_close(compiled(x), ours(x))
    torch.testing.assert_close(again.state_dict(), ours.state_dict())
    compiled(x).sum().backward()
    assert again.weight.grad is not None


def test_export_updates_running_statistics():
    ours, _ = layers(4, "relu")
    again = copy.deepcopy(ours)
    x = image((3, 4, 5, 6))
    exported = torch.export.export(again, (x,)).run_decompositions({}).module()
    torch.testing.assert_close(exported(x), ours(x))
    torch.testing.assert_close(dict(exported.named_buffers()), dict(ours.named_buffers()))


def test_vmap_rejects_shared_running_statistics():
    ours, _ = layers(4, "relu")
    x = image((3, 2, 4, 5, 6))
    with pytest.raises(RuntimeError, match="vmap cannot update running statistics"):
        vmap(ours)(x)


@pytest.mark.parametrize("mapped", [False, True], ids=["same input", "mapped input"])
def test_vmap_trains_ensembles(mapped):
    """Compare layers of torch.func.stack_module_state with the layers one by one."""
    members = [layers(3, "silu", dtype=torch.float64)[0] for _ in range(4)]
    for seed, layer in enumerate(members):
        nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(seed))
    parameters, buffers = stack_module_state(members)
    x = image((4, 5, 3, 6, 6), torch.float64)

    def loss(parameters, buffers, x):
        return functional_call(members[0], (parameters, buffers), (x,)).square().sum()

    in_dims = (0, 0, 0 if mapped else None)
    grads = vmap(grad(loss), in_dims)(parameters, buffers, x if mapped else x[0])
    for i, layer in enumerate(members):
        layer(x[i if mapped else 0]).square().sum().backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(grads[name][i], parameter.grad)
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(buffers[name][i], buffer)


def test_vmap_over_another_dimension_of_running_statistics():
    x = image((4, 2, 3, 5, 5))
    mean, var = torch.zeros(3, 4), torch.ones(3, 4)
    vmap(lambda *args: batch_norm_act2d(*args, training=True), (0, 1, 1))(x, mean, var)
    for i in range(4):
        alone = torch.zeros(3), torch.ones(3)
        batch_norm_act2d(x[i], *alone, training=True)
        torch.testing.assert_close((mean[:, i], var[:, i]), alone)


def test_evaluation_runs_standard_operators():
    ours, _ = layers(4, "relu")
    with Recorder() as recorder:
        ours.eval()(image((3, 4, 5, 6)))
    assert recorder.calls == []
    for shape in ((4, 5), (3, 4, 5)):
        with pytest.raises(RuntimeError, match=r"must have shape \[N, C, H, W\], got"):
            ours(torch.ones(shape))


def test_functions_that_know_batch_norm_leave_the_layer():
    """Expect no function to find the layer by type and drop its activation."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), BatchNormAct2d(3, "silu"))
    x = image((2, 3, 4, 4))
    for apply in (nn.SyncBatchNorm.convert_sync_batchnorm, fused_by_type, optimization.fuse):
        expected = model.eval()(x)
        torch.testing.assert_close(apply(model)(x), expected)
    assert not isinstance(model[1], nn.modules.batchnorm._BatchNorm)


@each_activation
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_recorded_calls_are_operators_of_pytorch(activation):
    model, _ = layers(3, activation, momentum=0.3)
    x = image((2, 3, 4, 4))
    for training in (True, False):
        model.train(training)
        again = copy.deepcopy(model)
        program = torch.export.export(again, (x,))
        targets = {str(node.target) for node in program.graph.nodes}
        assert "aten.batch_norm.default" in targets
        assert not any("lenet_ops" in target for target in targets)
        traced = torch.jit.trace(copy.deepcopy(model), x, check_trace=False)
        assert "lenet_ops" not in str(traced.inlined_graph)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)
