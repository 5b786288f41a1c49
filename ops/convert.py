"""Replace layers of existing models by layers of this package."""

from torch import nn

from ops.core import check
from ops.depthwise_conv2d import DepthwiseConv2d

_DEVICES = ("cpu", "cuda", "meta")


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
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"convert_depthwise: module must be an nn.Module, got {type(module).__name__}"
        )
    if _convertible(module):
        raise ValueError(
            "convert_depthwise: module is itself a depthwise Conv2d, which can only be replaced "
            "in a module that holds it; use DepthwiseConv2d, or wrap it in nn.Sequential"
        )
    converted: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and _convertible(child):
                if child not in converted:
                    converted[child] = _convert(child)
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
    layer.channels = conv.in_channels
    layer.padding = _padding(conv) or (0, 0)
    return layer
