"""torch.func: vmap over every choice of in_dims, per-sample gradients, jacrev, jacfwd."""

import itertools

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from ops import depthwise_conv2d
from tests.ops.operators import OPERATORS, each_device, each_operator
from tests.ops.tensors import as_tuple, inputs, lay_out, random

BATCH = 3


def in_dims_of(op):
    """Return every choice; with more than three tensors, those that map one, all or all but one."""
    tensors = len(op.cases[0].shapes)
    choices = itertools.product((None, 0, -1), repeat=tensors)
    mapped = [dims for dims in choices if any(d is not None for d in dims)]
    if tensors <= 3:
        return mapped
    unmapped = (tensors - 1, 1, 0)
    return [dims for dims in mapped if len(set(dims)) <= 2 and dims.count(None) in unmapped]


each_in_dims = pytest.mark.parametrize(
    ("op", "in_dims"),
    [pytest.param(op, dims, id=f"{op} {dims}") for op in OPERATORS for dims in in_dims_of(op)],
)


def batched(op, in_dims, device="cpu"):
    """Draw the first case's tensors, with a batch dimension at `in_dims`."""
    return [
        random(shape, torch.float64, device, seed=seed)
        if d is None
        else random((BATCH, *shape), torch.float64, device, seed=seed).movedim(0, d)
        for seed, (shape, d) in enumerate(zip(op.cases[0].shapes, in_dims, strict=True))
    ]


def one_by_one(function, in_dims, tensors):
    """Compute vmap's reference: the function of each sample, stacked."""
    samples = [
        function(
            *(x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True))
        )
        for i in range(BATCH)
    ]
    return tree_map(lambda *parts: torch.stack(parts), *samples)


def typical(op, function=None):
    """Return the first case as a function of its tensors, and a scalar loss of all outputs."""

    def outputs(*tensors):
        return (function or op.function)(*tensors, **op.cases[0].kwargs)

    def loss(*tensors):
        total = 0
        for y in as_tuple(outputs(*tensors)):
            weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device)
            total = total + (y + y.square()).flatten() @ weights
        return total

    return outputs, loss


def argnums(op):
    return tuple(range(len(op.cases[0].shapes)))


@each_device
@each_in_dims
def test_vmap(op, in_dims, device):
    function, _ = typical(op)
    tensors = batched(op, in_dims, device)
    actual = vmap(function, in_dims)(*tensors)
    torch.testing.assert_close(actual, one_by_one(function, in_dims, tensors))


@each_in_dims
def test_vmap_of_grad(op, in_dims):
    _, loss = typical(op)
    gradient = grad(loss, argnums(op))
    tensors = batched(op, in_dims)
    actual = vmap(gradient, in_dims)(*tensors)
    torch.testing.assert_close(actual, one_by_one(gradient, in_dims, tensors))


@each_operator
def test_vmap_of_vmap(op):
    function, _ = typical(op)
    shapes = op.cases[0].shapes
    tensors = [random((2, 3, *s), torch.float64, "cpu", seed=i) for i, s in enumerate(shapes)]
    flat = vmap(function)(*(x.flatten(0, 1) for x in tensors))
    expected = tree_map(lambda y: y.unflatten(0, (2, 3)), flat)
    torch.testing.assert_close(vmap(vmap(function))(*tensors), expected)


@each_operator
def test_grad_of_vmap(op):
    function, _ = typical(op)
    in_dims = tuple(0 for _ in op.cases[0].shapes)
    tensors = batched(op, in_dims)

    def total(function):
        return lambda *tensors: sum(y.square().sum() for y in as_tuple(function(*tensors)))

    actual = grad(total(vmap(function)), argnums(op))(*tensors)
    looped = total(lambda *tensors: one_by_one(function, in_dims, tensors))
    torch.testing.assert_close(actual, grad(looped, argnums(op))(*tensors))


@each_operator
def test_vjp(op):
    (function, _), (reference, _) = typical(op), typical(op, op.reference)
    tensors = inputs(op.cases[0])
    output, pullback = vjp(function, *tensors)
    expected_output, expected = vjp(reference, *tensors)
    torch.testing.assert_close(output, expected_output)
    torch.testing.assert_close(pullback(output), expected(output))


@each_operator
def test_jacrev(op):
    (function, _), (reference, _) = typical(op), typical(op, op.reference)
    tensors = inputs(op.cases[0])
    expected = jacrev(reference, argnums(op))(*tensors)
    torch.testing.assert_close(jacrev(function, argnums(op))(*tensors), expected)


@each_operator
def test_jacrev_of_grad(op):
    (_, loss), (_, reference) = typical(op), typical(op, op.reference)
    tensors = inputs(op.cases[0])
    torch.testing.assert_close(jacrev(grad(loss))(*tensors), jacrev(grad(reference))(*tensors))


@each_operator
def test_jvp(op):
    (function, _), (reference, _) = typical(op), typical(op, op.reference)
    tensors = inputs(op.cases[0])
    for i, x in enumerate(tensors):
        results = [
            jvp(lambda moved, f=f, i=i: f(*tensors[:i], moved, *tensors[i + 1 :]), (x,), (x.cos(),))
            for f in (function, reference)
        ]
        torch.testing.assert_close(*results)


@each_operator
@pytest.mark.parametrize(("outer", "inner"), [(jacfwd, jacrev), (jacrev, jacfwd), (jacfwd, jacfwd)])
def test_second_derivatives(op, outer, inner):
    (_, loss), (_, reference) = typical(op), typical(op, op.reference)
    tensors = inputs(op.cases[0])
    expected = jacrev(jacrev(reference))(*tensors)
    torch.testing.assert_close(outer(inner(loss))(*tensors), expected)


@each_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_vmap_folds_more_channels_than_a_cuda_grid(layout, device):
    """Fold samples into channels: gridDim.y is at most 65,535."""
    samples, channels = 3, 30_000
    x = random((samples, 1, channels, 3, 3), torch.float32, device)
    x = lay_out(x[:, 0], layout)[:, None]
    weight = random((samples, channels, 1, 3, 3), torch.float32, device, seed=1)

    def loss(x, weight):
        return depthwise_conv2d(x, weight, padding=1).square().sum()

    actual = vmap(grad(loss, (0, 1)))(x, weight)
    parts = [grad(loss, (0, 1))(*sample) for sample in zip(x, weight, strict=True)]
    expected = tree_map(lambda *tensors: torch.stack(tensors), *parts)
    torch.testing.assert_close(actual, expected)
