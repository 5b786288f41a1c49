"""Batch normalisation and the activation that follows it, in one operator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy

from ops.core import check, layout, windows
from ops.core.calls import public
from ops.core.composition import composed
from ops.core.registration import register
from ops.core.rules import folded
from ops.core.sharding import Strategies, without_redistribution
from ops.core.torch_private import NormBase
from ops.core.tracing import is_traced_to_graph, record_leaf

_NAME = "batch_norm_act2d"
_norm = torch.ops.lenet_ops.batch_norm_act2d.default
_norm_backward = torch.ops.lenet_ops.batch_norm_act2d_backward.default

# In the order of `enum class Activation` in op.h.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
_NAMES = tuple(ACTIVATIONS)


def batch_norm_act2d(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = "relu",
) -> Tensor:
    """Apply ``F.batch_norm`` and an activation.

    y = activation((x - mean) / sqrt(variance + eps) * weight + bias), with mean and variance of
    each channel. In training they are those of the batch, and one operator reads the input twice
    and writes the output once; for backward it saves the input, not the normalised values.
    Otherwise PyTorch's operators run.

    Args:
        input: [N, C, H, W], any strides; float64, float32, bfloat16 or float16.
        running_mean: [C] or None; in training, moves towards the batch's mean.
        running_var: [C] or None; in training, moves towards the batch's unbiased variance.
        weight: [C] or None, in the dtype of `input`, or float32 for 16-bit input.
        bias: [C] or None, as `weight`.
        training: use the batch's statistics, not the running ones.
        momentum: weight of the batch in the running statistics.
        eps: added to the variance.
        activation: None (or "identity"), "relu", "relu6", "silu" or "hardswish".

    Returns:
        [N, C, H, W] in the dtype and memory format of `input`.

    Raises:
        TypeError: an argument of the wrong type.
        NotImplementedError: an unsupported dtype.
        ValueError: an unknown activation, negative `eps`, in training one value per channel or one
            of the running statistics without the other.
        RuntimeError: mismatched shapes, dtypes or devices.
    """
    activation = check.activation(_NAME, activation, _NAMES)
    check.boolean(_NAME, "training", training)
    if not training:
        _check_image(input)
        if running_mean is None or running_var is None:
            raise RuntimeError(f"{_NAME}: running_mean and running_var are needed unless training")
        normal = F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
        return ACTIVATIONS[activation](normal)
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{_NAME}: running_mean and running_var must both be given, or both None")
    index = _NAMES.index(activation)
    return _call(input, weight, bias, index, eps, running_mean, running_var, momentum)


def _check_image(input: Tensor) -> None:
    check.tensor(_NAME, "input", input)
    if input.dim() != 4:  # not torch._check: torch.compile cannot trace its message
        raise RuntimeError(f"{_NAME}: input must have shape [N, C, H, W], got {list(input.shape)}")


def _check_values(input: Tensor, *args: Any) -> None:
    _check_image(input)
    eps = args[3]
    if input.numel() == input.shape[1]:
        raise ValueError(
            f"{_NAME}: input must have more than 1 value per channel, got {list(input.shape)}"
        )
    if eps < 0:
        raise ValueError(f"{_NAME}: eps must be at least 0, got {eps:g}")


_call = public(batch_norm_act2d, _norm, check_values=_check_values)

torch.fx.wrap("batch_norm_act2d")  # one node in torch.fx graphs


class BatchNormAct2d(NormBase):
    """Apply :func:`batch_norm_act2d`, with parameters and buffers of ``nn.BatchNorm2d``.

    State dicts interchange with ``nn.BatchNorm2d``. The class is not a subclass: functions that
    select batch normalisation by type ignore this layer, because they would drop its activation
    (``fuse_conv_bn_eval``, ``convert_sync_batchnorm``, ``update_bn``). Statistics are those of the
    process; for synchronised ones, use ``nn.SyncBatchNorm`` and an activation.

    torch.export, torch.jit.trace and torch.onnx record PyTorch's operators; ``symbolic_trace`` of
    torch.fx records the layer as one node.

    Args:
        num_features: C.
        activation: None (or "identity"), "relu", "relu6", "silu" or "hardswish".

    The others are those of ``nn.BatchNorm2d``.
    """

    def __init__(
        self,
        num_features: int,
        activation: str | None = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.activation = check.activation(_NAME, activation, _NAMES)

    def forward(self, input: Tensor) -> Tensor:
        """Return the activations of `input` [N, C, H, W]."""
        if isinstance(input, Proxy):
            return record_leaf(self, input)
        return apply_layer(self, input, self.activation)

    def extra_repr(self) -> str:
        """Show the arguments."""
        return f"{super().extra_repr()}, activation={self.activation!r}"


def apply_layer(layer: NormBase, input: Tensor, activation: str) -> Tensor:
    """Apply batch normalisation with the state of `layer`, then an activation.

    The running statistics are updated as in ``nn.BatchNorm2d.forward``.
    """
    momentum = 0.0 if layer.momentum is None else layer.momentum
    counts = layer.training and layer.track_running_stats
    if counts and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # cumulative average
            momentum = 1.0 / float(layer.num_batches_tracked)
    tracked = not layer.training or layer.track_running_stats
    mean = layer.running_mean if tracked else None
    var = layer.running_var if tracked else None
    training = layer.training or (layer.running_mean is None and layer.running_var is None)
    if is_traced_to_graph(input):
        y = F.batch_norm(input, mean, var, layer.weight, layer.bias, training, momentum, layer.eps)
        return ACTIVATIONS[activation](y)
    return batch_norm_act2d(
        input, mean, var, layer.weight, layer.bias, training, momentum, layer.eps, activation
    )


def _sums(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _check(op: str, input: Tensor, activation: int, eps: float, **channels: Tensor | None) -> None:
    """Check the arguments of a fake; `channels` have one value per channel."""
    windows.check_image(op, input)
    values = input.shape[0] * input.shape[2] * input.shape[3]
    check.argument(op, "input of 1 value per channel", values != 1)
    for name, x in channels.items():
        if x is not None:
            dtype = x.dtype if x.dtype == _sums(input) else input.dtype
            check.same(op, name, x, input.shape[1:2], dtype)
    check.argument(op, "activation", 0 <= activation < len(ACTIVATIONS))
    check.argument(op, "eps", eps >= 0)


def _fake(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, activation, eps, mean, var, _ = args
    channels = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
    _check(_NAME, input, activation, eps, **channels)
    statistics = input.new_empty(input.shape[1:2], dtype=_sums(input))
    return layout.resized(input, *input.shape[2:]), statistics, torch.empty_like(statistics)


def _fake_backward(grad_output: Tensor, input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    weight, bias, mean, rstd, activation, eps, mask = args
    op = f"{_NAME}_backward"
    _check(op, input, activation, eps, weight=weight, bias=bias)
    check.same(op, "grad_output", grad_output, input.shape, input.dtype)
    check.same(op, "mean", mean, input.shape[1:2], _sums(input))
    check.same(op, "rstd", rstd, input.shape[1:2], _sums(input))
    grads = [layout.resized(input, *input.shape[2:])]
    grads += [input.new_empty(0) if x is None else layout.gradient_of(x) for x in (weight, bias)]
    return windows.select(op, mask, *grads)


def _compose(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, activation: int, eps: float
) -> Tensor:
    """Compute the output with operators of which PyTorch has all derivatives."""
    x = input.to(_sums(input))
    x = x - x.mean((0, 2, 3), keepdim=True)
    x = x * (x.square().mean((0, 2, 3), keepdim=True) + eps).rsqrt()
    if weight is not None:
        x = x * weight.view(-1, 1, 1)
    if bias is not None:
        x = x + bias.view(-1, 1, 1)
    name = list(ACTIVATIONS)[activation]
    y = x * x.sigmoid() if name == "silu" else ACTIVATIONS[name](x)
    return y.to(input.dtype)


_derivatives, _second_derivatives = composed(_compose, inputs=3, outputs=1, constants=2)


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    """Compute samples as further channels, each with running statistics of its own."""
    *inputs, mean, var, momentum = args
    running: list[Tensor] = []
    for x, dim in zip((mean, var), in_dims[5:7], strict=True):
        if x is not None and dim is not None:
            running.append(x.movedim(dim, 0))
        elif x is not None:
            raise RuntimeError(
                f"{_NAME}: vmap cannot update running statistics that all samples share; map "
                "them, pass None, or eval() the module"
            )
    flat = [x.flatten() for x in running]
    rule = folded(_norm, (1, 0, 0), (1, 0, 0))
    dims = (*in_dims[:5], None, None, None)
    outputs = rule(info, dims, *inputs, *(flat or (None, None)), momentum)
    for x, updated in zip(running, flat, strict=True):
        x.copy_(updated.view_as(x))  # `flatten` copies unless the samples are adjacent
    return outputs


def _sharding(x: Any, *args: Any) -> Strategies:
    """Shard channels only: the statistics reduce over samples.

    Running statistics are updated in place, so they are never redistributed.
    """
    strategies: Strategies = [((1, 0, 0), (1, 0, 0, 0, 0)), ((None,) * 3, (None,) * 5)]
    return without_redistribution(f"{_NAME}: running_mean and running_var", strategies, *args[4:6])


register(
    _norm,
    fake=_fake,
    backward=_norm_backward,
    **_derivatives,
    vmap=_vmap,
    sharding=_sharding,
)
register(
    _norm_backward,
    fake=_fake_backward,
    **_second_derivatives,
    vmap=folded(_norm_backward, (1, 1, 0, 0, 0, 0), (1, 0, 0), mask=True),
    sharding=[((1, 0, 0), (1, 1, 0, 0, 0, 0))],
)
