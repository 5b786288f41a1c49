"""Tensors in every layout, how close results must be, and what an operator was seen to call."""

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
    """Returns `values` in another layout (only `expanded` changes them, to repetitions)."""
    if layout == "channels_last" and values.dim() in CHANNELS_LAST:
        return values.contiguous(memory_format=CHANNELS_LAST[values.dim()])
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        first = values.flatten()[:1].view([1] * values.dim()) if values.dim() < 2 else values[:1]
        return first.expand(values.shape)
    if layout == "sliced" and values.dim() >= 1:
        shape = [*(n + 2 for n in values.shape[:-1]), 2 * values.shape[-1] + 3]
        around = values.new_full(shape, torch.nan)  # what lies between must not be read
        view = around[(*(slice(1, n + 1) for n in values.shape[:-1]), slice(1, -2, 2))]
        return view.copy_(values)
    if layout == "surrounded":  # aligned and contiguous, but what lies beside it must not be read
        around = values.new_full((values.numel() + 128,), torch.nan)
        return around[64:-64].view(values.shape).copy_(values)
    if layout == "misaligned":
        memory = values.new_empty(values.numel() + 1)
        return memory[1:].view(values.shape).copy_(values)
    return values.contiguous()


def random(
    shape: Shape, dtype: torch.dtype, device: str, layout: str = "contiguous", seed: int = 0
) -> Tensor:
    """Draws a tensor that is the same on every device."""
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
    """Draws the tensors that a case asks for."""
    return [
        None
        if shape is None
        else random(shape, dtype, device, layout, seed).requires_grad_(requires_grad)
        for seed, shape in enumerate(case.shapes)
    ]


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Returns the outputs of an operator that has one or several, of a module also nested ones."""
    return tuple(tree_leaves(output))


def total(output: Any) -> Tensor:
    """Returns the sum of all outputs' elements."""
    return sum(y.sum() for y in as_tuple(output))


def gradients(
    outputs: Any, tensors: Sequence[Tensor | None], grad_outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the gradient of every tensor that there is."""
    return list(torch.autograd.grad(as_tuple(outputs), present(tensors), grad_outputs))


def split(op: Operator, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns what a network passes to the operator, and the parameters that it holds."""
    end = len(tensors) - op.state
    return [tensors[0], *tensors[end:]], list(tensors[1:end])


def join(data: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
    """Undoes :func:`split`."""
    return [data[0], *parameters, *data[1:]]


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def double(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Returns the same values in float64, detached, for the reference."""
    return [
        None if x is None else x.detach().double().contiguous().requires_grad_(x.requires_grad)
        for x in tensors
    ]


def assert_accurate(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, terms: float = 1, roundings: int = 1
) -> None:
    """Checks a result in `dtype` against the float64 reference on the same inputs.

    Allowed are so many roundings to `dtype`, after an accumulation of `terms` terms in at least
    float32 that may lose a few units in the last place of the largest sum.
    """
    assert actual.dtype == dtype
    accumulated = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 0.5 * roundings * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0
    before = rounding - rounding / roundings  # of terms that may cancel
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
    """A call of one of our operators below autograd."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    outputs: tuple[Tensor, ...]


class Recorder(TorchDispatchMode):
    """Records the calls that reach our kernels while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func.namespace == "lenet_ops":
            self.calls.append(Call(func, args, as_tuple(output)))
        return output


def record(op: Operator, case: Case, *tensors: Tensor | None) -> list[Call]:
    """Runs an operator forward and, where a gradient is asked for, backward."""
    with Recorder() as recorder:
        outputs = total(op.function(*tensors, **case.kwargs))
        if outputs.requires_grad:
            outputs.backward()
    return recorder.calls
