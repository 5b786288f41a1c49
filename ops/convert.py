"""Run layers of existing models by the operators of this package.

A conversion replaces the ``forward`` of a layer, not the layer. Its type, parameters, hooks and
place in the model remain, so functions that select layers by type (fusion, quantisation,
``convert_sync_batchnorm``, pruning) find PyTorch's layers and do with them what they always do.
Where torch.export, torch.jit.trace or torch.fx records a call, PyTorch's own ``forward`` runs.

After ``copy.copy``, the copy's ``forward`` runs with the original's parameters; use
``copy.deepcopy``.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import CodeType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ops.batch_norm_act2d import apply_layer
from ops.core import check
from ops.core.torch_private import has_hooks
from ops.core.tracing import is_traced_to_graph
from ops.depthwise_conv1d import depthwise_conv1d
from ops.depthwise_conv2d import depthwise_conv2d

_DEVICES = ("cpu", "cuda", "meta")
_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}


class Forward:
    """The ``forward`` of a converted layer; its class's own where a call is recorded for later."""

    def __init__(self, layer: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> None:
        """Store the layer and the function f(layer, input) that replaces its ``forward``."""
        self.layer, self.run = layer, run

    @property
    def __code__(self) -> CodeType:
        """Return the code of the original ``forward``, which torch.export asks a module for."""
        return type(self.layer).forward.__code__

    def __call__(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        run = _original_forward if is_traced_to_graph(input) else self.run
        return run(self.layer, input)


def convert_depthwise(module: nn.Module) -> int:
    """Run every depthwise ``nn.Conv1d`` and ``nn.Conv2d`` of a model by our operators, in place.

    Type, parameters, buffers, hooks and attributes of the layers stay. Only their ``forward`` is
    replaced, until :func:`restore`. An ``nn.Sequential`` computes an ``nn.Conv1d`` and the
    ``nn.SiLU`` that directly follows in one operator, unless one of the two has hooks.

    Layers that the operators cannot reproduce stay unchanged: subclasses (also parametrized and
    lazy layers), ``padding_mode`` other than "zeros", in two dimensions asymmetric
    ``padding="same"``, a replaced ``forward``, complex dtypes, devices other than CPU and CUDA.

    Args:
        module: The model.

    Returns:
        The number of converted layers.

    Raises:
        TypeError: `module` is not an nn.Module.
    """
    _check_module("convert_depthwise", module)
    layers = [layer for layer in module.modules() if _is_depthwise(layer)]
    for layer in layers:
        _replace_forward(layer, _convolve1d if isinstance(layer, nn.Conv1d) else _convolve2d)
    _fuse_sequences(module)
    return len(layers)


def convert_batch_norm(module: nn.Module) -> int:
    """Run every ``nn.BatchNorm2d`` of a model by :func:`batch_norm_act2d`, in place.

    An ``nn.Sequential`` computes batch normalisation and the activation that directly follows
    (ReLU, ReLU6, SiLU or Hardswish) in one operator, unless one of the two has hooks. timm's
    ``BatchNormAct2d`` is converted with its activation. Only training becomes faster: in evaluation
    PyTorch's operators run.

    Only the ``forward`` of batch normalisation and of ``nn.Sequential`` is replaced, until
    :func:`restore`.

    Not converted: subclasses of BatchNorm2d (such as SyncBatchNorm), layers with a replaced
    ``forward``, devices other than CPU and CUDA.

    Args:
        module: The model.

    Returns:
        The number of converted layers of batch normalisation.

    Raises:
        TypeError: `module` is not an nn.Module.
    """
    _check_module("convert_batch_norm", module)
    norms = [layer for layer in module.modules() if _is_batch_norm(layer)]
    for norm in norms:
        _replace_forward(norm, _normalize)
    _fuse_sequences(module)
    return len(norms)


def restore(module: nn.Module) -> int:
    """Undo :func:`convert_depthwise` and :func:`convert_batch_norm`, in place.

    Args:
        module: The model.

    Returns:
        The number of restored layers, without ``nn.Sequential``.

    Raises:
        TypeError: `module` is not an nn.Module.
    """
    _check_module("restore", module)
    layers = [layer for layer in module.modules() if _is_converted(layer)]
    for layer in layers:
        _restore_forward(layer)
    return sum(not isinstance(layer, nn.Sequential) for layer in layers)


def _check_module(function: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: module must be an nn.Module, got {type(module).__name__}")


def _replace_forward(layer: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> None:
    """Replace ``forward``; torch.jit.script, which cannot compile it, restores the layer first."""
    vars(layer).update(
        forward=Forward(layer, run),
        __prepare_scriptable__=partial(_restore_forward, layer),
        _replicate_for_data_parallel=partial(_replicate, layer),
    )


def _restore_forward(layer: nn.Module) -> nn.Module:
    for name in ("forward", "__prepare_scriptable__", "_replicate_for_data_parallel"):
        vars(layer).pop(name, None)
    return layer


def _replicate(layer: nn.Module) -> nn.Module:
    """Return the shallow copy that ``nn.DataParallel`` makes, with a ``forward`` of its own."""
    replica = type(layer)._replicate_for_data_parallel(layer)
    _replace_forward(replica, vars(layer)["forward"].run)
    return replica


def _is_converted(layer: nn.Module) -> bool:
    return isinstance(vars(layer).get("forward"), Forward)


def _original_forward(layer: nn.Module, input: Tensor) -> Tensor:
    output: Tensor = type(layer).forward(layer, input)
    return output


def _is_depthwise(module: nn.Module) -> bool:
    if type(module) not in (nn.Conv1d, nn.Conv2d) or "forward" in vars(module):
        return False
    if not module.in_channels == module.out_channels == module.groups:
        return False
    weight: Any = module.weight
    return _is_reproducible(module, weight)


def _is_reproducible(conv: Any, weight: Tensor) -> bool:
    """Return whether our operator computes a depthwise convolution with these attributes.

    `weight` is a plain tensor under torch.nn.utils.weight_norm, and with spectral_norm each access
    to the attribute is a step of its power iteration.
    """
    if weight.dtype not in check.FLOATING or weight.device.type not in _DEVICES:
        return False
    padding = _padding(conv)
    return padding is not None and (conv.padding_mode == "zeros" or not any(padding))


def _padding(conv: Any) -> Any:
    """Return the operator's padding; None if it is asymmetric in two dimensions."""
    if conv.padding == "valid":
        return 0, 0
    if isinstance(conv, nn.Conv1d):
        return conv.padding if isinstance(conv.padding, str) else conv.padding * 2
    if not isinstance(conv.padding, str):
        return conv.padding
    height, width = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    return None if height % 2 or width % 2 else (height // 2, width // 2)


def _convolve2d(conv: nn.Conv2d, input: Tensor) -> Tensor:
    weight = conv.weight
    if not _is_reproducible(conv, weight):  # changed since the conversion
        return _original_forward(conv, input)
    geometry: Any = (conv.stride, _padding(conv), conv.dilation)
    return depthwise_conv2d(input, weight, conv.bias, *geometry)


def _convolve1d(conv: nn.Conv1d, input: Tensor, activation: str | None = None) -> Tensor:
    weight = conv.weight
    if not _is_reproducible(conv, weight):
        output = _original_forward(conv, input)
        return output if activation is None else F.silu(output)
    geometry: Any = (conv.stride[0], _padding(conv), conv.dilation[0], activation)
    return depthwise_conv1d(input, weight, conv.bias, *geometry)


def _is_batch_norm(module: nn.Module) -> bool:
    if "forward" in vars(module) or _activation_of(module) is None:
        return False
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(x.device.type in _DEVICES and not x.is_complex() for x in tensors)


def _activation_of(norm: nn.Module) -> str | None:
    """Return the activation of batch normalisation; None for layers that cannot be converted."""
    kind = type(norm)
    if kind is nn.BatchNorm2d:
        return "identity"
    if f"{kind.__module__}.{kind.__name__}" != "timm.layers.norm_act.BatchNormAct2d":
        return None
    dropout, activation = norm.drop, norm.act
    if type(dropout) is not nn.Identity or not (_is_plain(dropout) and _is_plain(activation)):
        return None
    return _ACTIVATIONS.get(type(activation))  # type: ignore[arg-type]


def _is_plain(module: Any) -> bool:
    """Return whether a module has neither hooks nor a replaced forward."""
    return "forward" not in vars(module) and not has_hooks(module)


def _normalize(norm: nn.BatchNorm2d, input: Tensor) -> Tensor:
    activation = _activation_of(norm)
    if activation is None:  # changed since the conversion
        return _original_forward(norm, input)
    return apply_layer(norm, input, activation)


def _is_sequential(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)  # scripted modules have none
    return forward is nn.Sequential.forward and "forward" not in vars(module)


def _fuse_sequences(module: nn.Module) -> None:
    for layer in module.modules():
        if _is_sequential(layer) and any(_fused(*pair) for pair in pairwise(layer.children())):
            _replace_forward(layer, _run_in_sequence)


def _fused(layer: nn.Module, act: nn.Module | None) -> Callable[[Any, Tensor], Tensor] | None:
    """Return f(layer, input) that runs a converted `layer` and `act` in one operator, if any."""
    if act is None or not _is_converted(layer):
        return None
    if type(layer) is nn.BatchNorm2d and type(act) in _ACTIVATIONS:
        return partial(apply_layer, activation=_ACTIVATIONS[type(act)])
    if type(layer) is nn.Conv1d and type(act) is nn.SiLU:
        return partial(_convolve1d, activation="silu")
    return None


def _run_in_sequence(layers: nn.Sequential, input: Tensor) -> Tensor:
    following: nn.Module | None
    computed = None  # the activation that the layer before it has computed
    for layer, following in pairwise([*layers, None]):
        run = _fused(layer, following)
        if layer is computed:
            computed = None
        elif run and _is_plain(following) and not has_hooks(layer):
            input = run(layer, input)
            computed = following
        else:
            input = layer(input)
    return input
