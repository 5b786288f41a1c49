"""Feature maps of a network's first layers, as 8-bit images."""

import base64
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.inference.predictor import TorchPredictor
from app.models import ConvNet, LLTMClassifier
from ops import GELU, NCReLU


@torch.inference_mode()
def predict_with_maps(
    network: TorchPredictor, images: Tensor
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return logits [N, classes] of images uint8 [N, 1, H, W], and feature maps of the first image.

    Convolutional networks: the outputs of the first convolution and of the first activation. LLTM:
    the state after each row. Each group of maps has `title`, `count`, `height`, `width` and
    `values`: int8 in base64, ±127 for the largest absolute value of the layer.
    """
    module, output = network.module, network.normalize(images)
    if isinstance(module, LLTMClassifier):
        states, _ = module.rows(output[:1].squeeze(1))
        return network.logits(images), [_encode("State after each row", states, states)]
    module, maps = cast(ConvNet, module), []
    for layer in module.features:
        output = layer(output)
        if layer in (module.features[0], module.features[2]):
            maps += _maps(layer, output[0])
    return module.classifier(output), maps


def _maps(layer: nn.Module, values: Tensor) -> list[dict[str, Any]]:
    if isinstance(layer, NCReLU):
        positive, negative = values.chunk(2)
        return [
            _encode("Positive half", positive, values),
            _encode("Negative half", negative, values),
        ]
    act = {nn.ReLU: "relu", GELU: "gelu"}.get(type(layer))
    title = f"After pooling and {act}" if act else "First convolution"
    return [_encode(title, values, values)]


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
