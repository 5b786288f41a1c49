"""Properties of built-in operators: out-of-memory errors, FLOP counts, cached casts, host time."""

import timeit
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ops
from ops.core.library import has_eager
from tests.ops.operator_entry import raw
from tests.ops.operators import each_operator
from tests.ops.tensors import inputs, total
from tests.ops.test_library import copy_with_cpu_kernels, import_ops

TOO_MANY = 2**45  # elements: more bytes than a 47-bit address space


def assert_out_of_memory(function, name=""):
    with pytest.raises(RuntimeError) as raised:
        function()
    message = str(raised.value)
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in message
    assert message.endswith(f"(in {name})" if name else ")")
    assert "frame #" not in message
    assert "API call failed" not in message


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [ops.exp, ops.gelu, ops.ncrelu, raw.exp.default])
def test_out_of_memory(function, mode):
    if function is raw.exp.default and mode is torch.inference_mode and not has_eager():
        pytest.skip("only the eager library converts the kernel's error here")
    x = torch.ones(1, 1, requires_grad=True).expand(1, TOO_MANY)
    with mode():
        assert_out_of_memory(lambda: function(x))


def test_out_of_memory_in_backward():
    assert_out_of_memory(
        lambda: raw.global_avg_pool2d_backward(torch.ones(1, 1, 1, 1), 2**23, 2**22, False),
        "global_avg_pool2d_backward",
    )


def ones(*sizes):
    return torch.ones(1).expand(sizes)


TOO_LARGE = {
    "exp": lambda: ops.exp(ones(TOO_MANY)),
    "gelu": lambda: ops.gelu(ones(TOO_MANY)),
    "ncrelu": lambda: ops.ncrelu(ones(1, 2**61)),  # 2^64 bytes
    "global_avg_pool2d": lambda: ops.global_avg_pool2d(ones(1, TOO_MANY, 1, 1)),
    "max_pool2d": lambda: ops.max_pool2d(ones(1, 1, 2**20, TOO_MANY // 2**16), 2),
    "batch_norm_act2d": lambda: ops.batch_norm_act2d(
        ones(1, 1, 1, TOO_MANY), None, None, training=True
    ),
    "depthwise_conv1d": lambda: ops.depthwise_conv1d(  # 2^47 bytes
        ones(1, 2**15, 1), ones(2**15, 1, 1), padding=2**29
    ),
    "depthwise_conv2d": lambda: ops.depthwise_conv2d(  # 2^66 bytes
        ones(1, 1, 1, 1), ones(1, 1, 1, 1), padding=2**31
    ),
    "involution2d": lambda: ops.involution2d(
        ones(1, 1, 1, TOO_MANY), ones(1, 1, 1, 1, 1, TOO_MANY)
    ),
    "lltm": lambda: ops.lltm(ones(TOO_MANY, 1, 1), ones(3, 2), None, ones(1, 1), ones(1, 1)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_that_cannot_be_allocated_name_the_operator(name):
    assert_out_of_memory(TOO_LARGE[name], name)


OUT_OF_MEMORY = f"""
n = {TOO_MANY}
x = torch.ones(1, requires_grad=True)
image = x.expand(1, 1, 1, n)
layer = torch.fx.symbolic_trace(ops.MaxPool2d(1))
for function in (
    lambda: ops.exp(x.expand(n)),
    lambda: ops.involution2d(image, x.expand(1, 1, 1, 1, 1, n)),
    lambda: ops.lltm_cell(*(x.expand(size) for size in ((n, 1), (3, 2), 3, (n, 1), (n, 1)))),
    lambda: layer(image),
):
    for mode in (torch.enable_grad, torch.inference_mode):
        try:
            with mode():
                function()
        except RuntimeError as error:
            text = str(error)
            print("tried to allocate" in text, "API call" in text, error.__cause__, text[-15:])
"""


def test_out_of_memory_without_the_eager_library(tmp_path):
    result = import_ops(copy_with_cpu_kernels(tmp_path).parent, after=OUT_OF_MEMORY)
    pools = ("max_pool2d_with_indices", "max_pool2d")  # with and without gradients
    names = ("exp", "exp", "involution2d", "involution2d", "lltm", "lltm", *pools)
    expected = [f"True False None {f'memory) (in {name})'[-15:]}" for name in names]
    assert result.stdout.splitlines() == expected, result.stderr
    if torch.__version__ >= (2, 13):  # older ones log failed calls of the stable ABI
        assert "frame #" not in result.stderr


WORKSPACE_OUT_OF_MEMORY = """
import resource
n = 4_000_000  # a row: 8 MB in bfloat16, 48 MB in the workspace
x, weight = (torch.zeros(*shape, n, dtype=torch.bfloat16) for shape in ((1, 1, 1), (1, 1, 3, 3, 1)))
ops.involution2d(x[..., :64], weight[..., :64], padding=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, -1))
try:
    ops.involution2d(x, weight, padding=1)
except RuntimeError as error:
    print(error)
"""


def test_out_of_memory_in_a_workspace():
    result = import_ops(Path(ops.__file__).parents[1], after=WORKSPACE_OUT_OF_MEMORY)
    assert (result.returncode, result.stdout) == (0, "std::bad_alloc (in involution2d)\n")


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_out_of_gpu_memory(mode):
    x = torch.ones(1, 1, device="cuda", requires_grad=True).expand(1, 2**38)
    with mode(), pytest.raises(torch.OutOfMemoryError, match=r"(?s)Tried to allocate.*\(in exp\)"):
        ops.exp(x)


def flops(function, *tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    with FlopCounterMode(display=False) as counter:
        total(function(*leaves)).backward()
    return counter.get_total_flops()


def test_flops_of_depthwise_conv2d():
    """Compare with conv2d's forward; each gradient has the same FLOPs.

    conv2d's own count for the weight gradient ignores the groups.
    """
    x, weight, bias = inputs_of("depthwise_conv2d")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        F.conv2d(x, weight, bias, padding=1, groups=3)
    forward = counter.get_total_flops()
    assert forward == 2 * x.numel() * 9
    assert flops(lambda *t: ops.depthwise_conv2d(*t, padding=1), x, weight, bias) == 3 * forward


@pytest.mark.parametrize(("activation", "passes"), [(None, 3), ("silu", 4)])
def test_flops_of_depthwise_conv1d(activation, passes):
    """Expect as many FLOPs for each gradient as forward, and again for SiLU's gradient."""
    x, weight, bias = inputs_of("depthwise_conv1d")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        F.conv1d(F.pad(x, (3, 0)), weight, bias, groups=3)
    forward = counter.get_total_flops()
    assert forward == 2 * x.numel() * 4

    def function(*tensors):
        return ops.depthwise_conv1d(*tensors, padding="causal", activation=activation)

    assert flops(function, x, weight, bias) == passes * forward


def inputs_of(name):
    (op,) = [op for op in each_operator.args[1] if op.name == name]
    return inputs(op.cases[0], torch.float32)


def test_flops_of_involution2d():
    x, weight = torch.ones(2, 4, 5, 6), torch.ones(2, 2, 3, 3, 5, 6)
    assert flops(lambda *t: ops.involution2d(*t, padding=1), x, weight) == 3 * 2 * x.numel() * 9


@pytest.mark.parametrize("steps", [None, 5])
def test_flops_of_lltm(steps):
    """Expect the FLOPs of the matrix products: one forward, two backward."""
    x = torch.ones(3, 4) if steps is None else torch.ones(steps, 3, 4)
    weights, h, c = torch.ones(18, 10), torch.ones(3, 6), torch.ones(3, 6)
    function = ops.lltm_cell if steps is None else ops.lltm
    products = 3 * 2 * 3 * 18 * 10 * (steps or 1)
    assert flops(lambda x, w, h, c: function(x, w, None, h, c), x, weights, h, c) == products


def test_elementwise_operators_count_no_flops():
    x = torch.ones(2, 3, 4, 4)
    for function in (ops.exp, ops.gelu, ops.ncrelu, ops.global_avg_pool2d):
        assert flops(function, x) == 0


class CastCounter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def count_casts(function):
    """Return the casts in two regions that apply a layer twice, and the weight's gradient.

    The weight changes between the regions.
    """
    x, weight = torch.ones(1, 3, 5, 5), torch.ones(3, 1, 3, 3, requires_grad=True)
    counts = []
    for _ in range(2):
        with CastCounter() as casts, torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(function(x, weight), weight)
        y.sum().backward()
        counts.append(casts.count)
        with torch.no_grad():
            weight.add_(1)
    return counts, weight.grad


def depthwise(x, weight):
    return ops.depthwise_conv2d(x, weight, padding=1)


def test_autocast_casts_a_weight_once():
    expected, grad = count_casts(lambda x, w: F.conv2d(x, w, padding=1, groups=3))
    counts, actual = count_casts(depthwise)
    assert counts == expected == [2, 2]
    torch.testing.assert_close(actual, grad, rtol=0.02, atol=1)


CASTS = """
from tests.ops.test_like_builtins import count_casts, depthwise
print(count_casts(depthwise)[0])
x = torch.ones(1, 1, 3, 3, dtype=torch.float64)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(ops.depthwise_conv2d(x, x).dtype)
"""


def test_autocast_without_the_eager_library(tmp_path):
    copy = copy_with_cpu_kernels(tmp_path)
    tests = copy.parent / "tests"
    tests.symlink_to(__file__.rsplit("/", 2)[0])
    result = import_ops(copy.parent, after=CASTS)
    assert result.stdout.splitlines() == ["[3, 3]", "torch.float64"], result.stderr


def host_time(function):
    return min(timeit.repeat(function, number=500, repeat=9))


def is_fast(call, other, limit):
    """Return whether one of five ratios of host times is below `limit`, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return any(host_time(call) < limit * host_time(other) for _ in range(5))
    finally:
        torch.set_num_threads(threads)


each_peer = pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (ops.exp, torch.exp),
        (ops.ncrelu, torch.relu),
        (ops.gelu, F.gelu),
        (ops.global_avg_pool2d, lambda x: F.adaptive_avg_pool2d(x, 1)),
        (lambda x: ops.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2)),
    ],
    ids=["exp", "ncrelu", "gelu", "global_avg_pool2d", "max_pool2d"],
)


@pytest.mark.skipif(not has_eager(), reason="without the eager library, calls go through Python")
@each_peer
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_host_time(ours, builtin, mode):
    """Compare calls on a tiny tensor."""
    x = torch.ones(1, 2, 2, 2, requires_grad=True)
    with mode():
        assert is_fast(lambda: ours(x), lambda: builtin(x), 1.45)


@pytest.mark.skipif(not has_eager(), reason="without the eager library, calls go through Python")
@each_peer
def test_host_time_with_backward(ours, builtin):
    x = torch.ones(1, 2, 2, 2, requires_grad=True)

    def differentiate(function):
        grad = torch.ones_like(function(x))
        return lambda: torch.autograd.grad(function(x), x, grad)

    assert is_fast(differentiate(ours), differentiate(builtin), 1.3)


def test_host_time_of_pairs():
    """Compare pairs of ints with ints: both reach C++ without checks in Python."""
    x, weight = torch.ones(1, 2, 2, 2), torch.ones(2, 1, 1, 1)
    pairs = (2, 2), (1, 0), (1, 2)
    assert is_fast(
        lambda: ops.depthwise_conv2d(x, weight, None, *pairs),
        lambda: ops.depthwise_conv2d(x, weight, None, 2, 0, 1),
        limit=1.4,
    )
