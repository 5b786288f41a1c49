"""Feature maps of a network's first layers, as 8-bit images."""

import base64
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.inference.predictor import TorchPredictor
from app.models import ACTIVATIONS, ConvNet, LLTMClassifier
from ops import MaxPool2d, NCReLU

NAMES = {layer: name for name, layer in ACTIVATIONS.items()}


@torch.inference_mode()
def predict_with_maps(
    network: TorchPredictor, images: Tensor
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return logits [N, classes] of images uint8 [N, 1, H, W], and feature maps of the first image.

    Convolutional networks: the outputs of the first convolution and of the first activation. LLTM:
    the state after each row.
    """
    module, output = network.module, network.normalize(images)
    if isinstance(module, LLTMClassifier):
        states, _ = module.rows(output[:1].squeeze(1))
        return network.logits(images), [_encode("State after each row", states, states)]
    module = cast(ConvNet, module)
    layers = list(module.features)
    first = next(index for index, layer in enumerate(layers) if type(layer) in NAMES)
    pooled, maps = any(isinstance(layer, MaxPool2d) for layer in layers[:first]), []
    for index, layer in enumerate(layers):
        output = layer(output)
        if index == 0:
            maps.append(_encode("First convolution", output[0], output[0]))
        if index == first:
            maps += _activation_maps(layer, output[0], "pooling and " if pooled else "")
    return module.classifier(output), maps


def _activation_maps(layer: nn.Module, values: Tensor, before: str) -> list[dict[str, Any]]:
    if isinstance(layer, NCReLU):
        positive, negative = values.chunk(2)
        return [
            _encode("Positive half", positive, values),
            _encode("Negative half", negative, values),
        ]
    return [_encode(f"After {before}{NAMES[type(layer)]}", values, values)]


def _encode(title: str, maps: Tensor, scale: Tensor) -> dict[str, Any]:
    """Quantise maps float32 [count, H, W] to int8, in units of max|`scale`| / 127."""
    count, height, width = maps.shape
    scaled = (maps * (127 / scale.abs().max().clamp(min=1e-12))).round().to(torch.int8)
    return {
        "title": title,
        "count": count,
        "height": height,
        "width": width,
        "values": base64.b64encode(scaled.numpy().tobytes()).decode(),
    }
