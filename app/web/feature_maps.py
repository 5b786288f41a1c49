"""The outputs of a network's first layers, as pictures of 8 bits."""

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.data.transforms import normalize
from app.inference.predictor import TorchPredictor
from app.models import LeNet, RowReader
from ops import GELU, NCReLU


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


@torch.inference_mode()
def predict_with_maps(network: TorchPredictor, images: Tensor) -> tuple[Tensor, list[Maps]]:
    """Return logits [N, classes] of images uint8 [N, 1, H, W], and the maps of the first image.

    Maps are the outputs of the first convolution and of the activation after it, or the state of
    the recurrent network after each row.
    """
    module, output = network.module, normalize(images, *network.normalization)
    if not isinstance(module, LeNet):
        return network.logits(images), _states(module, output)
    maps = []
    for layer in module.features:
        output = layer(output)
        if layer in (module.features[0], module.features[2]):
            maps += _maps(layer, output[0])
    return module.classifier(output), maps


def _maps(layer: nn.Module, values: Tensor) -> list[Maps]:
    largest = float(values.abs().max())
    if isinstance(layer, NCReLU):
        positive, negative = values.chunk(2)
        return [Maps("Positive half", positive, largest), Maps("Negative half", negative, largest)]
    act = {nn.ReLU: "relu", GELU: "gelu"}.get(type(layer))
    title = f"After pooling and {act}" if act else "First convolution"
    return [Maps(title, values, largest)]


def _states(module: nn.Module, images: Tensor) -> list[Maps]:
    if not isinstance(module, RowReader):
        return []
    states, _ = module.rows(images[:1].squeeze(1))
    return [Maps("State after each row", states, float(states.abs().max()))]
