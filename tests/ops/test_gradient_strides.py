"""Gradients have the strides of their parameters, as DistributedDataParallel's buckets do."""

import warnings
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from ops import BatchNormAct2d, DepthwiseConv2d
from tests.ops.operators import OPERATORS, each_device
from tests.ops.tensors import CHANNELS_LAST, inputs, total


def strided(x, order, gap=0):
    """Return a copy of x whose strides grow in `order`; with a gap, it is not dense."""
    sizes = [x.shape[d] for d in order]
    sizes[0] += gap
    memory = x.new_zeros(sizes[::-1])
    view = memory.permute([len(order) - 1 - order.index(d) for d in range(x.dim())])
    return view.narrow(order[0], 0, x.shape[order[0]]).copy_(x)


def odd_strides(x):
    """Return x with other strides along its dimensions of size 1."""
    strides = [7 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def layouts(x):
    """Return copies of x in all orders of its dimensions, if few, and with gaps."""
    dims = range(x.dim())
    orders = permutations(dims) if x.dim() <= 3 else [dims[::-1], (1, 3, 2, 0), (0, 2, 1, 3)]
    orders = [tuple(o) if len(o) == x.dim() else (*o, *dims[4:]) for o in map(list, orders)]
    copies = [strided(x, order) for order in orders]
    if x.dim() in CHANNELS_LAST:
        copies.append(x.contiguous(memory_format=CHANNELS_LAST[x.dim()]))
    if x.dim() > 1:
        copies.append(odd_strides(x))
    return [*copies, strided(x, orders[0], gap=1)]


def expected_strides(x):
    """Return the strides of x if it is dense, otherwise those of a contiguous tensor."""
    dense = torch.empty_like(x).stride() == x.stride()
    return x.stride() if dense else torch.empty(x.shape).stride()


PARAMETERS = [
    pytest.param(op, i, id=f"{op} {i}")
    for op in OPERATORS
    for i in range(1, len(op.cases[0].shapes))
]


@each_device
@pytest.mark.parametrize(("op", "index"), PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_gradients(op, index, dtype, device):
    for case in op.cases:
        tensors = inputs(case, dtype, device, requires_grad=True)
        if tensors[index] is None:
            continue

        def gradients(x, tensors=tensors, case=case):
            replaced = [*tensors[:index], x, *tensors[index + 1 :]]
            output = total(op.function(*replaced, **case.kwargs))
            return torch.autograd.grad(output, x)[0]

        expected = gradients(tensors[index])
        for x in layouts(tensors[index].detach()):
            actual = gradients(x.requires_grad_())
            assert actual.stride() == expected_strides(x), (case, x.stride())
            torch.testing.assert_close(actual, expected)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                tensors = [None if t is None else mode.from_tensor(t) for t in tensors]
                fake = gradients(mode.from_tensor(x), tensors)
            assert fake.stride() == actual.stride(), (case, x.stride())


class Network(nn.Module):
    """Layers with every sort of parameter, channels-last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), BatchNormAct2d(8), DepthwiseConv2d(8, 3), DepthwiseConv2d(8, (1, 5))
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.fixture
def process_group():
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(always)
    dist.destroy_process_group()


def test_no_warning_under_ddp(process_group):
    network = DistributedDataParallel(Network())
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            network(x).backward()
    assert not [w for w in caught if "strides do not match" in str(w.message)]
    for parameter in network.parameters():
        assert parameter.grad.stride() == parameter.stride()
