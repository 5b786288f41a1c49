"""ncrelu's sign mask: two bits an element, the only tensor saved for backward."""

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import make_fx

from ops import NCReLU, ncrelu
from tests.ops.entries.ncrelu import reference
from tests.ops.operator_entry import raw
from tests.ops.operators import each_device
from tests.ops.tensors import CHANNELS_LAST, DTYPES, LAYOUTS, lay_out, random

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SPECIAL = (float("nan"), -float("nan"), 0.0, -0.0, float("inf"), -float("inf"))
ROWS = (*range(1, 41), 63, 64, 65, 68, 127, 1000, 1003, 40_001, 2**17 + 4)


def with_special(x):
    """Replace random elements of `x` by NaN, ±0 and ±∞."""
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(x)
    drawn = random(x.shape, torch.float64, "cpu", seed=5).abs().mul(2).to(x.device)
    index = drawn.mul(100).long() % len(SPECIAL)
    return torch.where(drawn < 1, values[index], x)


def same_bits(a, b):
    """Return whether two tensors are bitwise equal, with all NaN equal."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.itemsize]
    a_bits, b_bits = (x.masked_fill(x.isnan(), float("nan")).view(integers) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(a_bits, b_bits)


def unpack(signs, count):
    """Return the masks x > 0 and x < 0, in memory order."""
    assert signs.numel() == (count + 3) // 4
    bits = (signs.cpu().int()[:, None] & torch.tensor([1 << i for i in range(8)])) != 0
    assert not bits.view(-1)[2 * count :].any()
    return bits.view(-1, 2)[:count].unbind(1)


def check(x, grad, dim, channels_last=False):
    """Compare ncrelu and ncrelu_with_signs, forward and backward, with PyTorch bit by bit."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    output, signs = raw.ncrelu_with_signs(x, dim)
    expected = torch.cat((torch.where(x < 0, zero, x), torch.where(x > 0, zero, x)), dim)
    assert same_bits(output.contiguous(), expected.contiguous())
    assert same_bits(raw.ncrelu(x, dim).contiguous(), expected.contiguous())

    order = x.movedim(1, -1) if channels_last else x
    positive, negative = unpack(signs, x.numel())
    assert torch.equal(positive, (order > 0).flatten().cpu())
    assert torch.equal(negative, (order < 0).flatten().cpu())

    of_positive, of_negative = grad.chunk(2, dim)
    expected = torch.where(x > 0, of_positive, torch.where(x < 0, of_negative, zero)).contiguous()
    actual = raw.ncrelu_with_signs_backward(grad, signs, dim, channels_last)
    memory_format = CHANNELS_LAST[x.dim()] if channels_last else torch.contiguous_format
    assert actual.is_contiguous(memory_format=memory_format)
    assert same_bits(actual.contiguous(), expected)


@each_device
@pytest.mark.parametrize("outer", [1, 3, 8])
@each_dtype
def test_rows_of_any_length(dtype, outer, device):
    for inner in ROWS:
        x = with_special(random((outer, inner), dtype, device))
        check(x, random((outer, 2 * inner), dtype, device, seed=1), 1)


@each_device
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 6])
@each_dtype
def test_pointers_of_any_alignment(dtype, offset, device):
    for inner in (5, 8, 10, 12, 16, 24, 64, 1003, 4096):
        memory = with_special(random((7 * inner + offset,), dtype, device))
        grad_memory = random((14 * inner + offset,), dtype, device, seed=1)
        grad = grad_memory[offset:].view(7, -1)
        check(memory[offset:].view(7, -1), grad, 1)
        x = memory[: 7 * inner].view(7, -1)
        _, signs = raw.ncrelu_with_signs(x, 1)
        shifted = torch.cat((signs.new_zeros(offset), signs))[offset:]
        expected, actual = (
            raw.ncrelu_with_signs_backward(grad, bits, 1, False) for bits in (signs, shifted)
        )
        assert torch.equal(actual, expected)


@each_device
@pytest.mark.parametrize("shape", [(3, 6, 5, 7), (2, 64, 3, 4), (2, 9, 3, 2, 5), (4, 1, 4, 3)])
@each_dtype
def test_every_dimension_of_images(dtype, shape, device):
    for dim in range(-len(shape), len(shape)):
        sizes = list(shape)
        sizes[dim] *= 2
        for layout in ("contiguous", "channels_last"):
            x = lay_out(with_special(random(shape, dtype, device)), layout)
            channels_last = not x.is_contiguous()
            for grad_layout in LAYOUTS:
                grad = random(tuple(sizes), dtype, device, grad_layout, seed=1)
                check(x, grad, dim, channels_last)


@each_device
def test_signs_of_empty_tensors(device):
    for shape, dim in (((0,), 0), ((2, 0, 3), 1), ((0, 3, 4, 5), 1), ((2, 3, 0, 4), -1)):
        x = torch.empty(shape, device=device)
        output, signs = raw.ncrelu_with_signs(x, dim)
        assert signs.shape == (0,)
        assert raw.ncrelu_with_signs_backward(output, signs, dim, False).shape == shape


@each_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_saves_two_bits_an_element(layout, device):
    kept = []
    x = random((2, 6, 5, 7), torch.float32, device, layout).requires_grad_()
    with saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        ncrelu(x)
    assert [(saved.dtype, saved.numel()) for saved in kept] == [(torch.uint8, 105)]


@each_device
def test_forward_frees_the_input(device):
    leaf = random((2, 3, 5, 4), torch.float32, device).requires_grad_()
    between = leaf * 1
    output = ncrelu(between)
    memory = weakref.ref(between.untyped_storage())
    tensor = weakref.ref(between)
    del between
    gc.collect()
    assert tensor() is None
    assert memory() is None
    output.sum().backward()
    assert torch.equal(leaf.grad, (leaf != 0).float())


def test_input_changed_in_place_keeps_the_gradient():
    leaf = random((2, 3, 5, 4), torch.float32, "cpu").requires_grad_()
    between = leaf * 1
    output = ncrelu(between)
    with torch.no_grad():
        between.zero_()
    output.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_inference_graphs_have_no_signs():
    x = random((2, 3, 5, 4), torch.float32, "cpu").requires_grad_()
    program = torch.export.export(NCReLU(), (x,))
    for exported in (program, program.run_decompositions({})):
        called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
        assert called == [raw.ncrelu.default]
    traced = torch.jit.trace(NCReLU(), (x,))
    kinds = [node.kind() for node in traced.inlined_graph.nodes() if "lenet" in node.kind()]
    assert kinds == ["lenet_ops::ncrelu"]


@each_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_batched_and_second_gradients(dim, layout, device):
    x = random((2, 3, 5, 4), torch.float64, device, layout).requires_grad_()
    exact = x.detach().clone().requires_grad_()
    grads = random((3, *reference(x, dim).shape), torch.float64, device, seed=1)
    for batched in (False, True):
        grad = (grads if batched else grads[0]).requires_grad_()
        results = []
        for function, tensor in ((ncrelu, x), (reference, exact)):
            (first,) = torch.autograd.grad(
                function(tensor, dim), tensor, grad, create_graph=True, is_grads_batched=batched
            )
            results.append((first, *torch.autograd.grad((first * first.detach()).sum(), grad)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def second_gradient(x, grad, vector):
    (first,) = torch.autograd.grad(
        ncrelu(x.requires_grad_()), x, grad.requires_grad_(), create_graph=True
    )
    return torch.autograd.grad(first, grad, vector)[0]


def test_second_gradients_trace_with_dynamic_sizes():

    def draw(n, c):
        sizes = ((n, c, 5, 4), (n, 2 * c, 5, 4), (n, c, 5, 4))
        return [random(s, torch.float64, "cpu", seed=i) for i, s in enumerate(sizes)]

    graph = make_fx(second_gradient, tracing_mode="symbolic")(*draw(2, 3))
    assert torch.equal(graph(*draw(3, 7)), second_gradient(*draw(3, 7)))


def test_infinite_second_gradients_and_tangents_are_masked():
    x = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    vector = torch.full_like(x, torch.inf)
    expected = torch.tensor([[torch.inf, 0, 0, 0, torch.inf, 0]], dtype=torch.float64)
    assert torch.equal(second_gradient(x.clone(), torch.ones(1, 6).double(), vector), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, vector)
        for output in (ncrelu(dual), raw.ncrelu_with_signs(dual, 1)[0]):
            assert torch.equal(forward_ad.unpack_dual(output).tangent, expected)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (1, 1)])
def test_vmap_over_signs(in_dims):
    xs = random((3, 2, 6), torch.float64, "cpu")
    outputs, signs = torch.vmap(lambda x: raw.ncrelu_with_signs(x, 1))(xs)
    torch.testing.assert_close(outputs, torch.stack([ncrelu(x) for x in xs]))
    args = [
        value[0] if d is None else value.movedim(0, d)
        for value, d in zip((outputs, signs), in_dims, strict=True)
    ]

    def backward(grad, signs):
        return raw.ncrelu_with_signs_backward(grad, signs, 1, False)

    samples = [
        backward(*(v if d is None else v.select(d, i) for v, d in zip(args, in_dims, strict=True)))
        for i in range(3)
    ]
    torch.testing.assert_close(torch.vmap(backward, in_dims)(*args), torch.stack(samples))


def test_autograd_of_vjp():
    x = random((2, 3, 5, 4), torch.float64, "cpu").requires_grad_()
    results = []
    for function in (ncrelu, reference):
        output, pull = vjp(lambda t, f=function: f(f(t).sin()).square().sum(), x)
        (inner,) = pull(torch.ones_like(output))
        results.append((inner, *torch.autograd.grad(inner.square().sum(), x)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_vmap_dim_excludes_the_batch(dim):
    x = random((3, 2, 5), torch.float64, "cpu")
    expected = torch.stack([ncrelu(sample, dim) for sample in x])
    assert torch.equal(torch.vmap(lambda v: ncrelu(v, dim))(x), expected)
    grads = random(expected.shape, torch.float64, "cpu", seed=1)
    actual = torch.vmap(lambda v, g: vjp(lambda t: ncrelu(t, dim), v)[1](g)[0])(x, grads)
    samples = [vjp(lambda t: ncrelu(t, dim), v)[1](g)[0] for v, g in zip(x, grads, strict=True)]
    assert torch.equal(actual, torch.stack(samples))
