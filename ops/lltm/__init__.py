"""LLTM: a recurrent cell without a forget gate, and its loop over time."""

import math

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ops.core import check
from ops.core.memory import convert_out_of_memory
from ops.core.torch_private import is_traced
from ops.core.tracing import record_leaf
from ops.lltm.autograd import State, forward


def lltm_cell(
    input: Tensor, weights: Tensor, bias: Tensor | None, old_h: Tensor, old_cell: Tensor
) -> State:
    """Apply :func:`lltm` to one step: the recurrent cell of PyTorch's tutorial on C++ extensions.

    [i, o, z] = [h, x] · Wᵀ + b, of S columns each; then
    c' = c + elu(z) · σ(i) and h' = tanh(c') · σ(o).

    The LLTM is an LSTM without a forget gate. The activation of the candidate z is ELU (Clevert et
    al., arXiv 1511.07289).
    https://docs.pytorch.org/tutorials/advanced/cpp_extension.html

    Args:
        input: x, [N, I] or [I]; float64, float32, bfloat16 or float16.
        weights: W, [3S, S + I], columns of h first. All tensors have one dtype and device.
        bias: b, [3S], or None.
        old_h: h, [N, S] or [S].
        old_cell: c, [N, S] or [S].

    Returns:
        h' and c', each [N, S] or [S].

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        RuntimeError: mismatched shapes, dtypes or devices.
    """
    states = {"old_h": old_h, "old_cell": old_cell}
    _check("lltm_cell", "input", "[N, I]", input, weights, bias, states)
    _, new_h, new_cell = lltm(input[None], weights, bias, old_h, old_cell)
    return new_h, new_cell


@convert_out_of_memory
def lltm(
    sequence: Tensor, weights: Tensor, bias: Tensor | None, h0: Tensor, c0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the LLTM to a sequence, step by step.

    Args:
        sequence: [T, N, I] or [T, I], at least one step; float64, float32, bfloat16 or float16.
        weights: [3S, S + I]. All tensors have one dtype and device.
        bias: [3S], or None.
        h0: initial h, [N, S] or [S].
        c0: initial c, [N, S] or [S].

    Returns:
        h of all steps, [T, N, S] or [T, S], and h and c after the last step. For 16-bit dtypes, the
        recurrence keeps sums of products and c in float32, and h in its own dtype.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        RuntimeError: mismatched shapes, dtypes or devices, an empty sequence.
    """
    _check("lltm", "sequence", "[T, N, I]", sequence, weights, bias, {"h0": h0, "c0": c0})
    if sequence.dim() == 3:
        output, h, c, _ = forward(sequence, weights, bias, h0, c0)
        return output, h, c
    output, h, c, _ = forward(sequence[:, None], weights, bias, h0[None], c0[None])
    return output[:, 0], h[0], c[0]


torch.fx.wrap("lltm_cell")  # one node in torch.fx graphs
torch.fx.wrap("lltm")


def _check(
    op: str,
    name: str,
    shape: str,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    states: dict[str, Tensor],
) -> None:
    """Check types and ranks of `x` (argument `name`, of `shape`, or without N) and the others."""
    batched = check.batched(op, name, x, shape)
    for argument, value in {"weights": weights, "bias": bias, **states}.items():
        if argument != "bias" or bias is not None:
            check.tensor(op, argument, value)
    for state, value in states.items():
        if value.dim() != 1 + batched:
            raise RuntimeError(
                f"{op}: {state} must have shape {'[N, S]' if batched else '[S]'} beside "
                f"{name} of shape {list(x.shape)}, got {list(value.shape)}"
            )


class _Recurrent(nn.Module):
    """Parameters and initialisation of a recurrent layer, as in torch.nn."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check.boolean(name, "bias", bias)
        check.positive(name, input_size=input_size, hidden_size=hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.weights = nn.Parameter(
            torch.empty(3 * hidden_size, hidden_size + input_size, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(3 * hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _check_features(self, name: str, x: Tensor, size: int) -> None:
        layer = type(self).__name__
        check.tensor(layer, name, x)
        if not is_traced() and (x.dim() == 0 or x.shape[-1] != size):
            raise RuntimeError(
                f"{layer}: {name} must have {size} features in its last dimension, "
                f"got shape {list(x.shape)}"
            )

    def _checked_state(self, input: Tensor, state: State | None, batch_dim: int) -> State:
        """Check the arguments; return `state`, or zeros for None. The batch is at `batch_dim`."""
        self._check_features("input", input, self.input_size)
        if state is None:
            zeros = input.new_zeros(*input.shape[batch_dim:-1], self.hidden_size)
            return zeros, zeros
        if not (isinstance(state, (tuple, list)) and len(state) == 2):
            size = f" of {len(state)}" if isinstance(state, (tuple, list)) else ""
            given = type(state).__name__ + size
            layer = type(self).__name__
            raise TypeError(f"{layer}: state must be a pair of tensors (h, c), got {given}")
        for name, x in zip("hc", state, strict=True):
            self._check_features(f"state {name}", x, self.hidden_size)
        return state

    def reset_parameters(self) -> None:
        """Draw all parameters from U(−1/√S, 1/√S), as nn.LSTM does."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """Show the arguments that differ from their defaults."""
        text = f"{self.input_size}, {self.hidden_size}"
        return text if self.bias is not None else text + ", bias=False"


class LLTMCell(_Recurrent):
    """Apply :func:`lltm_cell`, with the call signature of ``nn.LSTMCell``.

    Args:
        input_size: number of input features, I.
        hidden_size: number of features of the state, S.
        bias: whether to add a learned bias [3S].
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def forward(self, input: Tensor, state: State | None = None) -> State:
        """Return (h', c') for `input` [N, I] or [I] and `state` (h, c); None: zeros."""
        if isinstance(input, Proxy):
            return record_leaf(self, input, state)
        return lltm_cell(input, self.weights, self.bias, *self._checked_state(input, state, 0))


class LLTM(_Recurrent):
    """Apply :func:`lltm`, as ``nn.LSTM`` with one layer. States have no layer dimension.

    Args:
        input_size: number of input features, I.
        hidden_size: number of features of the state, S.
        bias: whether to add a learned bias [3S].
        batch_first: whether input and output are [N, T, …] instead of [T, N, …].
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        batch_first: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device=device, dtype=dtype)
        check.boolean("LLTM", "batch_first", batch_first)
        self.batch_first = batch_first

    def forward(self, input: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return h of all steps, and (h, c) after the last step.

        Args:
            input: [T, N, I], [N, T, I] with `batch_first`, or [T, I].
            state: initial (h, c), each [N, S] or [S]; None: zeros.
        """
        if isinstance(input, Proxy):
            return record_leaf(self, input, state)
        swap = self.batch_first and isinstance(input, Tensor) and input.dim() == 3
        sequence = input.transpose(0, 1) if swap else input
        state = self._checked_state(sequence, state, 1)
        output, h, c = lltm(sequence, self.weights, self.bias, *state)
        return output.transpose(0, 1) if swap else output, (h, c)

    def extra_repr(self) -> str:
        """Show the arguments that differ from their defaults."""
        return super().extra_repr() + (", batch_first=True" if self.batch_first else "")
