"""Calls from Python: which are read in C++, and that all others behave the same."""

import sys
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops.core.calls import make_caller
from ops.core.library import has_eager
from tests.ops.operator_entry import raw
from tests.ops.tensors import as_tuple

X = torch.linspace(-1, 1, 32).view(1, 2, 4, 4)
WEIGHT = torch.ones(2, 1, 3, 3)
CALLS = {
    "exp": lambda x: ops.exp(x),
    "gelu": lambda x: ops.gelu(x),
    "ncrelu": lambda x: ops.ncrelu(x, dim=1),
    "global_avg_pool2d": lambda x: ops.global_avg_pool2d(x),
    "max_pool2d": lambda x: ops.max_pool2d(x, 2, padding=(1, 0)),
    "depthwise_conv2d": lambda x: ops.depthwise_conv2d(x, WEIGHT, stride=(2, 1)),
}
each_call = pytest.mark.parametrize(("name", "call"), CALLS.items(), ids=CALLS)
needs_eager = pytest.mark.skipif(not has_eager(), reason="needs the eager library")


class Subclass(torch.Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def is_read_in_cpp(op, *args, rank=0):
    others = []
    function = make_caller(op, lambda *args: others.append(args), rank=rank)
    results = function(*args)
    assert others == ([] if results is not None else [args])
    return not others


@needs_eager
@pytest.mark.parametrize(
    "mode",
    [nullcontext(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")],
    ids=["grad", "no_grad", "inference", "autocast"],
)
def test_plain_arguments_are_read_in_cpp(mode):
    leaf = X.clone().requires_grad_()
    with mode:
        assert is_read_in_cpp(raw.exp.default, leaf, rank=4)
        assert is_read_in_cpp(raw.exp.default, nn.Parameter(X))
        assert is_read_in_cpp(raw.ncrelu.default, X, -3)
        for pair in (1, (1, 1)):
            args = (pair, pair, 0, pair, True)
            assert is_read_in_cpp(raw.max_pool2d.default, X, *args)
        for bias in (None, nn.Parameter(torch.ones(2))):
            assert is_read_in_cpp(raw.depthwise_conv2d.default, X, WEIGHT, bias, 1, 0, 1)
            args = (X[:, :, 0], WEIGHT[..., 0], bias, 1, (2, 0), 1, True)
            assert is_read_in_cpp(raw.depthwise_conv1d.default, *args)


@needs_eager
@pytest.mark.parametrize(
    "dim", [True, 1.0, "1", None, np.int64(1), torch.tensor(1), (1,), 2**63], ids=repr
)
def test_other_arguments_are_left_to_python(dim):
    assert not is_read_in_cpp(raw.ncrelu.default, X, dim)


@needs_eager
@pytest.mark.parametrize(
    "args", [(), (None,), (X, X), (3,), (X.as_subclass(Subclass),), (X[0],)], ids=len
)
def test_other_tensors_are_left_to_python(args):
    assert not is_read_in_cpp(raw.exp.default, *args, rank=4)


@needs_eager
@pytest.mark.parametrize("pair", [(1,), (1, 1, 1), [1, 1], (1, True), (1, 1.0), True], ids=repr)
def test_other_pairs_are_left_to_python(pair):
    assert not is_read_in_cpp(raw.max_pool2d.default, X, 1, pair, 0, 1, False)


@needs_eager
def test_modes_and_transforms_are_left_to_python():
    def check(x):
        assert not is_read_in_cpp(raw.exp.default, x)
        return x

    with FunctionMode():
        check(X)
    with TorchDispatchMode():
        check(X)
    with FakeTensorMode() as mode:
        check(mode.from_tensor(X))
    torch.func.vmap(check)(X)
    torch.func.jvp(check, (X,), (X,))
    torch.jit.trace(check, X, check_trace=False)


@each_call
def test_function_mode_sees_the_operator(name, call):
    with FunctionMode() as mode:
        call(X)
    assert getattr(raw, name).default in mode.functions


@each_call
def test_subclass_is_kept(name, call):
    output = call(X.as_subclass(Subclass))
    assert type(output) is Subclass
    assert torch.equal(output, call(X))


@each_call
def test_symbolic_tracing_of_functions(name, call):
    traced = torch.fx.symbolic_trace(lambda x: call(x))
    assert len([node for node in traced.graph.nodes if node.op == "call_function"]) == 1
    assert torch.equal(traced(X), call(X))


@each_call
@pytest.mark.parametrize("wrong", [3, None, [1.0], X.to(torch.int64), X.to_sparse()], ids=type)
def test_errors_are_those_of_the_operator(name, call, wrong):
    with pytest.raises((TypeError, NotImplementedError), match=rf"^{name}: "):
        call(wrong)


def test_exceptions_of_hooks_are_passed_on():
    class HookError(Exception):
        pass

    packed = []

    def pack(x):
        packed.append(x)
        raise HookError

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, pytest.raises(HookError):
        ops.exp(X.clone().requires_grad_())
    assert len(packed) == 1  # the call is not repeated


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    x = X.clone().requires_grad_()

    def network(x):
        return ops.max_pool2d(ops.gelu(ops.exp(x)), 2)

    y = torch.utils.checkpoint.checkpoint(network, x, use_reentrant=reentrant)
    (actual,) = torch.autograd.grad(y.sum(), x) if not reentrant else backward(y, x)
    assert torch.equal(actual, torch.autograd.grad(network(x).sum(), x)[0])


def backward(y, x):
    y.sum().backward()
    return as_tuple(x.grad)


@needs_eager
def test_gil_is_released():
    x, steps, running = torch.ones(2**24), [0], threading.Event()

    def count():
        while not finished:
            steps[0] += 1
            running.set()
            time.sleep(1e-4)  # releases the GIL, else the main thread waits for the interval

    finished = False
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    running.wait()
    try:
        sys.setswitchinterval(10)  # no thread is made to yield
        before = steps[0]
        ops.exp(x)
        assert steps[0] > before
    finally:
        finished = True
        sys.setswitchinterval(interval)
        thread.join()
