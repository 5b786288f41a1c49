"""First and second derivatives, saved tensors, and autograd's other features."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import ops
from ops.core import library
from tests.ops.operators import OPERATORS, each_case, each_device, each_operator
from tests.ops.tensors import as_tuple, gradients, inputs, present, random, record, total

each_saving = pytest.mark.parametrize(
    "op", [op for op in OPERATORS if op.saves != "nothing"], ids=str
)


def call_present(op, case, tensors):
    """Return the operator as a function of the tensors that are not None, and these tensors."""

    def function(*given):
        rest = iter(given)
        return op.function(*(None if x is None else next(rest) for x in tensors), **case.kwargs)

    return function, present(tensors)


@each_case
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients_against_finite_differences(op, case, check):
    function, tensors = call_present(op, case, inputs(case, requires_grad=True))
    small = sum(x.numel() for x in tensors) <= 40  # else fast mode: one projection of the Jacobian
    forward = "check_forward_ad" if check is gradcheck else "check_fwd_over_rev"
    settings = {"fast_mode": not small, "check_batched_grad": small, forward: True}
    assert check(function, tensors, **settings)


@each_device
@pytest.mark.parametrize(
    ("op", "needed"),
    [
        pytest.param(op, needed, id=f"{op} {''.join('-+'[n] for n in needed)}")
        for op in OPERATORS
        for needed in itertools.product((False, True), repeat=len(op.cases[0].shapes))
    ],
)
def test_computes_only_required_gradients(op, needed, device):
    tensors = inputs(op.cases[0], torch.float32, device)
    for x, requires_grad in zip(tensors, needed, strict=True):
        x.requires_grad_(requires_grad)
    forward, *backward = record(op, op.cases[0], *tensors)
    assert forward.op._opname == ((op.autograd_variant if any(needed) else None) or op.name)
    assert [x.grad is not None for x in tensors] == list(needed)
    assert len(backward) == any(needed)
    for call in backward:
        assert sum(y.numel() > 0 for y in call.outputs) == sum(needed)


@pytest.mark.parametrize(
    "op", [op for op in OPERATORS if op.saves in ("input", "output", "both")], ids=str
)
def test_saves_what_backward_needs(op):
    """Expect an error after an in-place change of a saved tensor, and only then."""
    tensors = inputs(op.cases[0], requires_grad=True)
    leaf = tensors[0] * 1
    outputs = as_tuple(op.function(leaf, *tensors[1:], **op.cases[0].kwargs))
    loss = total(outputs)
    saved, others = [], []
    for name, x in (("input", leaf), ("output", outputs[0])):
        (saved if op.saves in (name, "both") else others).append(x)
    with torch.no_grad():
        for x in others:
            x.add_(1)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        saved[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def tangent_of_gradient(function, tensors, directions):
    """Return the Hessian-vector products, by forward over reverse mode."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, v) for x, v in zip(tensors, directions, strict=True)]
        outputs = as_tuple(function(*duals))
        grads = torch.autograd.grad(sum(y.square().sum() for y in outputs), duals)
        return [forward_ad.unpack_dual(g).tangent for g in grads]


@each_operator
def test_forward_over_reverse_without_create_graph(op):
    tensors = inputs(op.cases[0], requires_grad=True)
    directions = [random(x.shape, torch.float64, "cpu", seed=7) for x in tensors]
    actual, expected = (
        tangent_of_gradient(lambda *xs, f=f: f(*xs, **op.cases[0].kwargs), tensors, directions)
        for f in (op.function, op.reference)
    )
    torch.testing.assert_close(actual, expected)


@each_saving
def test_backward_frees_saved_tensors(op):
    tensors = inputs(op.cases[0], requires_grad=True)
    output = total(op.function(*tensors, **op.cases[0].kwargs))
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


@each_operator
def test_autograd_node_is_cpp(op):
    if not list(Path(ops.__file__).parent.glob(f"{library.EAGER}.*")):
        pytest.skip("the eager library was not built for this PyTorch")
    tensors = inputs(op.cases[0], requires_grad=True)
    outputs = as_tuple(op.function(*tensors, **op.cases[0].kwargs))
    assert {type(y.grad_fn).__name__ for y in outputs} == {"CppFunction"}


@each_operator
def test_saved_tensors_hooks(op):
    function, tensors = call_present(op, op.cases[0], inputs(op.cases[0], requires_grad=True))
    expected = torch.autograd.grad(total(function(*tensors)), tensors)
    packed = []
    hooks = (lambda x: packed.append(x) or x.clone(), lambda x: x)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        output = total(function(*tensors))
    assert all(map(torch.equal, torch.autograd.grad(output, tensors), expected))
    assert bool(packed) == (op.saves != "nothing")


@each_operator
def test_compiled_autograd(op):
    function, tensors = call_present(op, op.cases[0], inputs(op.cases[0], requires_grad=True))
    total(function(*tensors)).backward()
    expected = [x.grad for x in tensors]
    for x in tensors:
        x.grad = None
    output = total(function(*tensors))
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        output.backward()
    for x, grad in zip(tensors, expected, strict=True):
        torch.testing.assert_close(x.grad, grad)


@pytest.mark.skipif(not library.has_eager(), reason="a torch.autograd.Function does not raise")
@pytest.mark.parametrize("compiled", [False, True])
def test_input_detached_in_place_raises(compiled):
    """As a built-in operator does: double backward would treat the input as constant."""
    x = torch.ones(3, requires_grad=True) * 2
    output = ops.gelu(x).sum()
    x.detach_()
    torch._dynamo.reset()
    compiler = torch.compile(backend="eager")
    mode = torch._dynamo.compiled_autograd._enable(compiler) if compiled else nullcontext()
    with mode, pytest.raises(RuntimeError, match="detached in-place"):
        output.backward()


@each_operator
def test_no_grad(op):
    tensors = inputs(op.cases[0], requires_grad=True)
    with torch.no_grad():
        for y in as_tuple(op.function(*tensors, **op.cases[0].kwargs)):
            assert not y.requires_grad
    with torch.inference_mode():
        for y in as_tuple(op.function(*tensors, **op.cases[0].kwargs)):
            assert y.is_inference()


@each_operator
def test_accumulates_into_existing_gradients(op):
    tensors = inputs(op.cases[0], requires_grad=True)
    outputs = as_tuple(op.function(*tensors, **op.cases[0].kwargs))
    grads = [random(y.shape, torch.float64, "cpu", seed=9) for y in outputs]
    once = gradients(outputs, tensors, grads)
    for _ in range(2):
        torch.autograd.backward(as_tuple(op.function(*tensors, **op.cases[0].kwargs)), grads)
    twice = [x.grad for x in tensors]
    for a, b in zip(twice, once, strict=True):
        assert torch.equal(a, 2 * b)
