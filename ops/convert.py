"""Replace layers of existing models by layers of this package."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import TypeGuard

from torch import nn

from ops.batch_norm_act2d import BatchNormAct2d
from ops.core import check
from ops.depthwise_conv2d import DepthwiseConv2d

_DEVICES = ("cpu", "cuda", "meta")
_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}


def convert_depthwise(module: nn.Module) -> int:
    """Replace every depthwise ``nn.Conv2d`` of a model by a :class:`DepthwiseConv2d`, in place.

    New layers share the parameters of the old layers: optimizers and state dicts remain valid.
    Hooks, buffers, attributes, dtype, device and training mode are kept. A layer that the model
    holds several times is replaced by one layer.

    Layers that DepthwiseConv2d cannot reproduce stay unchanged: subclasses of Conv2d (also
    parametrized and lazy layers), ``padding_mode`` other than "zeros", asymmetric
    ``padding="same"``, a replaced ``forward``, complex dtypes, devices other than CPU and CUDA.

    Args:
        module: The model.

    Returns:
        The number of replaced layers.

    Raises:
        TypeError: `module` is not an nn.Module.
        ValueError: `module` itself is a depthwise Conv2d: it has no parent to replace it in.
    """
    return _replace("convert_depthwise", "depthwise Conv2d", module, _convertible, _convert)


def convert_batch_norm(module: nn.Module) -> int:
    """Replace every ``nn.BatchNorm2d`` of a model by a :class:`BatchNormAct2d`, in place.

    An activation (ReLU, ReLU6, SiLU or Hardswish) that directly follows in an ``nn.Sequential``
    becomes part of the layer, and an ``nn.Identity`` takes its place: the keys of the state dict
    remain. timm's layer of the same name is replaced with its activation. New layers share the
    parameters and buffers of the old layers, and keep hooks, attributes and training mode. Only
    training becomes faster.

    For synchronized batch normalisation, call ``convert_sync_batchnorm`` before this function:
    afterwards it would drop the activations, as would ``fuse_conv_bn_eval``.

    Layers stay unchanged that are subclasses of BatchNorm2d (such as SyncBatchNorm), have a
    replaced ``forward``, or are on devices other than CPU and CUDA. An activation stays if it or
    the layer before it has hooks, or if that layer occurs several times in the model.

    Args:
        module: The model.

    Returns:
        The number of replaced layers.

    Raises:
        TypeError: `module` is not an nn.Module.
        ValueError: `module` itself is a BatchNorm2d: it has no parent to replace it in.
    """
    count = _replace(
        "convert_batch_norm", "BatchNorm2d", module, _is_batch_norm, _convert_batch_norm
    )
    uses = Counter(child for parent in module.modules() for child in parent._modules.values())
    for parent in module.modules():
        if type(parent).forward is nn.Sequential.forward and "forward" not in vars(parent):
            for (_, norm), (name, act) in pairwise(list(parent._modules.items())):
                if _is_fusible(norm, act) and uses[norm] == 1:
                    norm.activation = _ACTIVATIONS[type(act)]  # type: ignore[index]
                    parent._modules[name] = nn.Identity()
    return count


def _replace(
    function: str,
    kind: str,
    module: nn.Module,
    convertible: Callable[[nn.Module], bool],
    convert: Callable[[nn.Module], nn.Module],
) -> int:
    """Replace the convertible submodules; return their number."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: module must be an nn.Module, got {type(module).__name__}")
    if convertible(module):
        raise ValueError(
            f"{function}: module is itself a {kind}, which can only be replaced in a module that "
            "holds it; wrap it in nn.Sequential"
        )
    converted: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and convertible(child):
                if child not in converted:
                    converted[child] = convert(child)
                parent._modules[name] = converted[child]
    return len(converted)


def _convertible(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or "forward" in vars(module):
        return False
    if not module.in_channels == module.out_channels == module.groups:
        return False
    weight = module.weight  # under torch.nn.utils.weight_norm a plain tensor
    if weight.dtype not in check.FLOATING or weight.device.type not in _DEVICES:
        return False
    padding = _padding(module)
    return padding is not None and (module.padding_mode == "zeros" or padding == (0, 0))


def _padding(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Return the padding (height, width) of each side; None if it is asymmetric."""
    if conv.padding == "valid":
        return 0, 0
    if not isinstance(conv.padding, str):
        height, width = conv.padding
        return height, width
    height, width = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    return None if height % 2 or width % 2 else (height // 2, width // 2)


def _convert(conv: nn.Module) -> DepthwiseConv2d:
    assert isinstance(conv, nn.Conv2d)
    layer = DepthwiseConv2d.__new__(DepthwiseConv2d)
    layer.__dict__ |= vars(conv)  # parameters, buffers, hooks, mode, users' attributes
    layer.padding = _padding(conv) or (0, 0)
    return layer


def _is_batch_norm(module: nn.Module) -> bool:
    if "forward" in vars(module) or _activation_of(module) is None:
        return False
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(x.device.type in _DEVICES and not x.is_complex() for x in tensors)


def _activation_of(norm: nn.Module) -> str | None:
    """Return the activation of batch normalisation; None for layers that cannot be replaced."""
    kind = type(norm)
    if kind is nn.BatchNorm2d:
        return "identity"
    if f"{kind.__module__}.{kind.__name__}" != "timm.layers.norm_act.BatchNormAct2d":
        return None
    dropout, activation = norm.drop, norm.act
    if type(dropout) is not nn.Identity or not (_is_plain(dropout) and _is_plain(activation)):
        return None
    return _ACTIVATIONS.get(type(activation))  # type: ignore[arg-type]


def _is_plain(module: object) -> bool:
    """Return whether a module has neither hooks nor a replaced forward."""
    return "forward" not in vars(module) and not any(
        hooks for name, hooks in vars(module).items() if name.endswith("_hooks")
    )


def _convert_batch_norm(norm: nn.Module) -> BatchNormAct2d:
    layer = BatchNormAct2d.__new__(BatchNormAct2d)
    layer.__dict__ |= vars(norm)  # parameters, buffers, hooks, mode, users' attributes
    layer.activation = _activation_of(norm) or "identity"
    return layer


def _is_fusible(norm: nn.Module | None, act: nn.Module | None) -> TypeGuard[BatchNormAct2d]:
    """Return whether `act` can become part of `norm`, which comes before it."""
    return (
        isinstance(norm, BatchNormAct2d)
        and norm.activation == "identity"
        and type(act) in _ACTIVATIONS
        and _is_plain(norm)
        and _is_plain(act)
    )
