"""Predict the picture of a request; feature maps of a network's first layers."""

import base64
import io
import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from app.config.errors import UserError
from app.inference.image_io import Gray, read_gray
from app.inference.predictor import TorchPredictor, check_finite
from app.inference.preprocess import frame
from app.models import ACTIVATIONS, ConvNet, LLTMClassifier
from app.web.networks import load_network
from ops import MaxPool2d, NCReLU

MAX_PIXELS = 4096 * 4096  # per picture; a small PNG file may decompress to gigabytes
NAMES = {layer: name for name, layer in ACTIVATIONS.items()}


def read_picture(body: bytes) -> Gray:
    """Read the picture of a request: a PNG file, or the gray bytes of a square drawing.

    Raise a UserError if the body is neither, or the picture too large.
    """
    if body.startswith(b"\x89PNG"):
        return read_gray(io.BytesIO(body), MAX_PIXELS, ["PNG"])
    side = math.isqrt(len(body))
    if not body or side**2 != len(body):
        raise UserError("not a PNG picture, and not the gray bytes of a square")
    return np.frombuffer(body, np.uint8).reshape(side, side)


def predict_picture(path: Path, gray: Gray) -> dict[str, Any]:
    """Predict a picture with the network in `path`, framed as in `python -m app.predict`.

    `image` is the input in base64; an exported file has no `maps`, a blank picture no prediction.
    Raise a UserError if the network cannot be used.
    """
    network, start = load_network(path), time.perf_counter()
    image = frame(gray, network.data.name)
    between = time.perf_counter()
    result: dict[str, Any] = {"classes": network.data.classes, "class": None, "probabilities": None}
    result |= {"image": None, "maps": None}
    if image is not None:
        if isinstance(network, TorchPredictor):
            logits, result["maps"] = predict_with_maps(network, image[None])
            check_finite(logits)
        else:
            logits = network.logits(image[None])
        probabilities = logits[0].softmax(0)
        result["class"] = network.data.classes[int(probabilities.argmax())]
        result["probabilities"] = [round(value, 5) for value in probabilities.tolist()]
        result["image"] = base64.b64encode(image.numpy().tobytes()).decode()
    end = time.perf_counter()
    result["milliseconds"] = {
        "framing": round(1e3 * (between - start), 2),
        "network": round(1e3 * (end - between), 2),
    }
    return result


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
