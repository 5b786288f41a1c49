"""Operators under pairs of a compiler and a transformation: the reference's numbers, or an error.

Each cell runs the first case of one operator. The transformation is applied inside the function
that is compiled or exported, or outside, to the result. The cells of MAY_RAISE are limits of
PyTorch, which hold for its own operators, too; docs/torch-versions.md lists them.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from tests.ops.operators import OPERATORS, each_operator
from tests.ops.tensors import as_tuple, inputs


def loss_of(function):
    return lambda *xs: sum(y.square().sum() for y in as_tuple(function(*xs)))


def direction(xs):
    return tuple(x.cos() for x in xs)


def samples(xs):
    return [torch.stack((x, x.sin())) for x in xs]


def gradient(function):
    return lambda *xs: grad(loss_of(function), tuple(range(len(xs))))(*xs)


def backward(function):
    def run(*xs):
        leaves = [x.detach().requires_grad_() for x in xs]
        loss_of(function)(*leaves).backward()
        return [x.grad for x in leaves]

    return run


def double_backward(function):
    def run(*xs):
        leaves = [x.detach().requires_grad_() for x in xs]
        first = torch.autograd.grad(loss_of(function)(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    return run


def dual_level(function):
    def run(*xs):
        with forward_ad.dual_level():
            duals = map(forward_ad.make_dual, xs, direction(xs))
            return [forward_ad.unpack_dual(y).tangent for y in as_tuple(function(*duals))]

    return run


def autocast(function):
    def run(*xs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*(x.float() for x in xs))

    return run


def checkpointed(use_reentrant):
    return lambda f: lambda *xs: checkpoint(f, *xs, use_reentrant=use_reentrant)


def same(function):
    return function


# Transformation: what is applied inside a compiled function, and then to the compiled function.
INSIDE = {
    "forward": (same, same),
    "grad": (gradient, same),
    "jvp": (lambda f: lambda *xs: jvp(f, xs, direction(xs))[1], same),
    "dual level": (dual_level, same),
    "jvp of grad": (lambda f: lambda *xs: jvp(gradient(f), xs, direction(xs))[1], same),
    "vmap": (lambda f: lambda *xs: vmap(f)(*samples(xs)), same),
    "vmap of grad": (lambda f: lambda *xs: vmap(gradient(f))(*samples(xs)), same),
    "autocast": (autocast, same),
    "checkpoint": (checkpointed(False), backward),
    "reentrant checkpoint": (checkpointed(True), backward),
}
OUTSIDE = {
    "backward": backward,
    "double backward": double_backward,
    **{name: transform for name, (transform, outer) in INSIDE.items() if outer is same},
    "checkpoint": lambda f: backward(checkpointed(False)(f)),
    "reentrant checkpoint": lambda f: backward(checkpointed(True)(f)),
}
del OUTSIDE["forward"]


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *xs):
        return self.function(*xs)


def compiled(backend):
    def compile(function, xs):
        torch._dynamo.reset()
        return torch.compile(function, backend=backend)

    return compile


def exported(strict):
    return lambda f, xs: torch.export.export(Wrapped(f), tuple(xs), strict=strict).module()


def packaged(function, xs):
    """Compile ahead of time by AOTInductor."""
    program = torch.export.export(Wrapped(function), tuple(xs))
    return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))


WAYS = {
    "compile": compiled("aot_eager"),
    "export": exported(strict=False),
    "strict export": exported(strict=True),
    "inductor": compiled("inductor"),
    "AOTInductor": packaged,
}
BOTH = {"inside": INSIDE, "outside": OUTSIDE}
PLACES = {"compile": BOTH, "export": BOTH, "inductor": BOTH}  # others: inside only
IN_CI = {  # the others need --exhaustive: minutes, those that compile C++ an hour
    "compile inside": ("jvp", "vmap of grad", "autocast", "checkpoint"),
    "compile outside": ("backward", "double backward", "dual level"),
    "export inside": ("jvp", "dual level"),
    "export outside": tuple(OUTSIDE),
    "strict export inside": ("jvp",),
}

_EXPORT = dict.fromkeys(
    ("grad", "jvp of grad", "vmap", "vmap of grad", "reentrant checkpoint"),
    (RuntimeError, AttributeError),
)
if torch.__version__ < (2, 13):
    _EXPORT |= dict.fromkeys(("jvp", "dual level", "jvp of grad"), (AssertionError, RuntimeError))
MAY_RAISE = {
    "compile outside": {"double backward": RuntimeError},
    "inductor outside": {"double backward": RuntimeError},
    "export inside": _EXPORT,
    "strict export inside": {**_EXPORT, "checkpoint": RuntimeError},
    "AOTInductor inside": {  # a package has no gradients
        **_EXPORT,
        "checkpoint": RuntimeError,
    },
}


@functools.cache
def expected(operator, name):
    (op,) = (op for op in OPERATORS if op.name == operator)
    transform = OUTSIDE.get(name, same)
    return as_tuple(transform(in_tensors(op.reference, op))(*inputs(op.cases[0])))


def in_tensors(function, op):
    return lambda *xs: function(*xs, **op.cases[0].kwargs)


def check(actual, op, name):
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if name == "autocast" else {"rtol": 1e-6, "atol": 1e-8}
    for y, wanted in zip(as_tuple(actual), expected(op.name, name), strict=True):
        torch.testing.assert_close(y.double(), wanted.double(), **tolerance)
    with forward_ad.dual_level():  # fails if a compiled graph has left a level
        pass


@pytest.fixture(autouse=True)
def leave_levels():
    """Leave the levels of torch.func and forward mode that PyTorch's exporters do not leave."""
    yield
    torch._C._autograd._saved_tensors_hooks_enable()
    while torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch.pop_dynamic_layer_stack()
    with contextlib.suppress(RuntimeError):
        torch._C._exit_dual_level(level=0)
    forward_ad._current_level = -1


@pytest.mark.parametrize("name", ["forward", *OUTSIDE])
@each_operator
def test_eager(op, name):
    transform = OUTSIDE.get(name, same)
    check(transform(in_tensors(op.function, op))(*inputs(op.cases[0])), op, name)


def cells():
    for way in WAYS:
        for place, names in PLACES.get(way, {"inside": INSIDE}).items():
            for name in names:
                slow = name not in IN_CI.get(f"{way} {place}", ())
                marks = [pytest.mark.exhaustive] if slow else []
                yield pytest.param(way, place, name, id=f"{way} {place} {name}", marks=marks)


@pytest.mark.parametrize(("way", "place", "name"), list(cells()))
@each_operator
def test_compiled(op, way, place, name):
    tensors = inputs(op.cases[0])
    inner, outer = INSIDE[name] if place == "inside" else (same, OUTSIDE[name])
    with contextlib.suppress(MAY_RAISE.get(f"{way} {place}", {}).get(name, ())):
        function = WAYS[way](inner(in_tensors(op.function, op)), tensors)
        check(outer(function)(*tensors), op, name)


def test_inductor():
    op = next(op for op in OPERATORS if op.name == "gelu")
    tensors = inputs(op.cases[0])
    function = WAYS["inductor"](INSIDE["jvp"][0](in_tensors(op.function, op)), tensors)
    check(function(*tensors), op, "jvp")
