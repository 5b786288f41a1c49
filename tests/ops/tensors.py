"""Input tensors in every layout, tolerances, and a recorder of operator calls."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.operator_entry import Case, Operator, Shape

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = (
    "contiguous",
    "channels_last",
    "sliced",
    "transposed",
    "expanded",
    "misaligned",
    "surrounded",
)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def lay_out(values: Tensor, layout: str) -> Tensor:
    """Return `values` in another layout; `expanded` repeats the first one."""
    if layout == "channels_last" and values.dim() in CHANNELS_LAST:
        return values.contiguous(memory_format=CHANNELS_LAST[values.dim()])
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        first = values.flatten()[:1].view([1] * values.dim()) if values.dim() < 2 else values[:1]
        return first.expand(values.shape)
    if layout == "sliced" and values.dim() >= 1:
        shape = [*(n + 2 for n in values.shape[:-1]), 2 * values.shape[-1] + 3]
        around = values.new_full(shape, torch.nan)  # a read of the gaps gives NaN
        view = around[(*(slice(1, n + 1) for n in values.shape[:-1]), slice(1, -2, 2))]
        return view.copy_(values)
    if layout == "surrounded":  # aligned and contiguous; an out-of-bounds read gives NaN
        around = values.new_full((values.numel() + 128,), torch.nan)
        return around[64:-64].view(values.shape).copy_(values)
    if layout == "misaligned":
        memory = values.new_empty(values.numel() + 1)
        return memory[1:].view(values.shape).copy_(values)
    return values.contiguous()


def random(
    shape: Shape, dtype: torch.dtype, device: str, layout: str = "contiguous", seed: int = 0
) -> Tensor:
    """Draw a tensor with the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    return lay_out(values.to(device, dtype), layout)


def inputs(
    case: Case,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: str = "contiguous",
    requires_grad: bool = False,
) -> list[Tensor | None]:
    """Draw the tensors of a case."""

    def draw(shape: Shape, seed: int) -> Tensor:
        return random(shape, dtype, device, layout, seed).requires_grad_(requires_grad)

    return [None if s is None else draw(s, seed) for seed, s in enumerate(case.shapes)]


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return one output, several or nested ones as a flat tuple."""
    return tuple(tree_leaves(output))


def total(output: Any) -> Tensor:
    """Return the sum over all elements of all outputs."""
    return sum(y.sum() for y in as_tuple(output))


def gradients(
    outputs: Any, tensors: Sequence[Tensor | None], grad_outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the tensors that are not None."""
    return list(torch.autograd.grad(as_tuple(outputs), present(tensors), grad_outputs))


def split(op: Operator, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the activations (first tensor, state) and the parameters of a layer."""
    end = len(tensors) - op.state
    return [tensors[0], *tensors[end:]], list(tensors[1:end])


def join(data: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
    """Return the tensors in the operator's order: the inverse of `split`."""
    return [data[0], *parameters, *data[1:]]


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def double(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return detached float64 copies, the reference's inputs."""
    return [
        None if x is None else x.detach().double().contiguous().requires_grad_(x.requires_grad)
        for x in tensors
    ]


def assert_accurate(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, terms: float = 1, roundings: int = 1
) -> None:
    """Compare a result with the float64 reference.

    The tolerance is the error of `roundings` successive roundings to `dtype`, plus that of a sum of
    `terms` terms accumulated in at least float32.
    """
    assert actual.dtype == dtype
    accumulated = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 0.5 * roundings * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    before = rounding - rounding / roundings  # all but the last one: their terms may cancel
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=rounding + 8 * accumulated,
        atol=(max(16, terms**0.5) * accumulated + before) * scale,
        equal_nan=True,
    )


class Call(NamedTuple):
    """A call of a `lenet_ops` operator below autograd."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    outputs: tuple[Tensor, ...]


class Recorder(TorchDispatchMode):
    """Record the calls of `lenet_ops` operators below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.namespace == "lenet_ops":
            self.calls.append(Call(func, args, as_tuple(output)))
        return output


def record(op: Operator, case: Case, *tensors: Tensor | None) -> list[Call]:
    """Run an operator, and backward if a tensor requires gradients; return the recorded calls."""
    with Recorder() as recorder:
        outputs = total(op.function(*tensors, **case.kwargs))
        if outputs.requires_grad:
            outputs.backward()
    return recorder.calls
