"""The outputs of a network's first layers, as pictures of 8 bits."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.models import LeNet, RowReader
from ops import NCReLU


@dataclass
class Maps:
    """Outputs of a layer.

    Attributes:
        title: For people.
        values: float32 [maps, H, W].
        largest: Absolute value that is shown in full colour.
    """

    title: str
    values: Tensor
    largest: float

    def to_json(self) -> dict[str, Any]:
        """Return sizes and int8 values, -127 ... 127 for -largest ... largest, in base64."""
        count, height, width = self.values.shape
        scaled = (self.values * (127 / max(self.largest, 1e-12))).round().to(torch.int8)
        return {
            "title": self.title,
            "count": count,
            "height": height,
            "width": width,
            "largest": self.largest,
            "values": base64.b64encode(scaled.numpy().tobytes()).decode(),
        }


class FeatureMaps:
    """Run a network and keep what its first layers give.

    Args:
        module: The network; it is given forward hooks.
        prepare: From images uint8 [N, 1, 28, 28] to its input.
    """

    def __init__(self, module: nn.Module, prepare: Callable[[Tensor], Tensor]) -> None:
        self._module, self._prepare = module.eval(), prepare
        self._outputs: dict[nn.Module, Tensor] = {}
        for layer in _layers(module):
            layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, _: Any, output: Any) -> None:
        self._outputs[layer] = output[0] if isinstance(output, tuple) else output

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> tuple[Tensor, list[Maps]]:
        """Logits [N, classes] of images uint8 [N, 1, H, W], and the maps of the first of them."""
        logits = self._module(self._prepare(images))
        return logits, [
            maps for layer in _layers(self._module) for maps in _maps(layer, self._outputs[layer])
        ]


def _layers(module: nn.Module) -> list[nn.Module]:
    """The first convolution and the activation after it, or the recurrent layer."""
    if isinstance(module, LeNet):
        return [module.features[0], module.features[2]]
    return [module.rows] if isinstance(module, RowReader) else []


def _maps(layer: nn.Module, output: Tensor) -> list[Maps]:
    values = output[0].float()
    largest = float(values.abs().max())
    if values.ndim == 2:
        return [Maps("State of the LLTM, row by row", values[None], largest)]
    if isinstance(layer, NCReLU):
        positive, negative = values.chunk(2)
        return [Maps("Positive half", positive, largest), Maps("Negative half", negative, largest)]
    act = {"ReLU": "relu", "GELU": "gelu"}.get(type(layer).__name__)
    title = f"After pooling and {act}" if act else "First convolution"
    return [Maps(title, values, largest)]
