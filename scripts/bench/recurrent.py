"""The LLTM against its composition and an LSTM: functions of (x, weights, bias, h, c)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import ops

NAMES = ("lltm_cell", "lltm")
LSTM = "nn.LSTM"  # for comparison: another function of the same size


def shapes(op: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the tensors' shapes from (N, I, S) for a cell or (T, N, I, S) for a sequence."""
    *steps, n, i, s = shape
    return [(*steps, n, i), (3 * s, s + i), (3 * s,), (n, s), (n, s)]


def ours(op: str) -> Callable[..., Tensor]:
    """Return this project's operator, reduced to its output h."""
    operator = ops.lltm if op == "lltm" else ops.lltm_cell
    return lambda *tensors: operator(*tensors)[0]


def composition(op: str) -> Callable[..., Tensor]:
    """Return the same function composed of PyTorch operators, a Python loop over the steps."""

    def cell(x: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, o, z = F.linear(torch.cat((h, x), 1), weights, bias).chunk(3, 1)
        c = c + F.elu(z) * torch.sigmoid(i)
        return torch.tanh(c) * torch.sigmoid(o), c

    def sequence(x: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> Tensor:
        outputs = []
        for step in x.unbind():
            h, c = cell(step, weights, bias, h, c)
            outputs.append(h)
        return torch.stack(outputs)

    return sequence if op == "lltm" else lambda *tensors: cell(*tensors)[0]


def lstm(op: str, tensors: list[Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return an LSTM of the same size and its tensors: input, two weights, two biases, h, c."""
    x, weights, _, h, c = tensors
    state = h.shape[1]
    columns = torch.cat((weights, weights[:state])), x.new_zeros(4 * state)
    inputs = [x, columns[0][:, state:].contiguous(), columns[0][:, :state].contiguous()]
    inputs += [columns[1], columns[1].clone(), h, c]

    def step(x: Tensor, w: Tensor, r: Tensor, b: Tensor, d: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return torch.lstm_cell(x, (h, c), w, r, b, d)[0]

    def loop(x: Tensor, w: Tensor, r: Tensor, b: Tensor, d: Tensor, h: Tensor, c: Tensor) -> Tensor:
        state = (h[None], c[None])
        return torch.lstm(x, state, (w, r, b, d), True, 1, 0.0, True, False, False)[0]

    return (loop if op == "lltm" else step), inputs
