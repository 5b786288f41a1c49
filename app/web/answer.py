"""Predict a drawing; pictures of the network's input and of its first feature maps."""

import base64
import io
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from app.config.errors import UserError
from app.inference.image_io import Gray
from app.inference.predictor import TorchPredictor, check_finite
from app.inference.preprocess import frame
from app.models import ACTIVATIONS, ConvNet, LLTMClassifier
from app.web.networks import load_network

NAMES = {layer: name for name, layer in ACTIVATIONS.items()}
ZERO, POSITIVE, NEGATIVE = np.array([[255, 255, 255], [201, 84, 8], [18, 89, 168]])  # RGB
CONTRAST = 0.7  # exponent: makes small values visible
COLUMNS = 6  # of feature maps, at least: NCReLU's positive half is above its negative half


def read_drawing(body: bytes) -> Gray:
    """Return the gray bytes of a square drawing as [H, W]; raise a UserError for other bodies."""
    side = math.isqrt(len(body))
    if not body or side**2 != len(body):
        raise UserError("not the gray bytes of a square")
    return np.frombuffer(body, np.uint8).reshape(side, side)


def predict_drawing(path: Path, gray: Gray) -> dict[str, Any]:
    """Predict a drawing with the checkpoint in `path`, framed as in `python -m app.predict`.

    Return pairs (class, probability) and (title, picture as a data URL); none for a blank drawing.
    Raise a UserError if the network cannot be used.
    """
    network = load_network(path)
    image = frame(gray, network.data.name)
    if image is None:
        return {"probabilities": [], "pictures": []}
    logits, maps = predict_with_maps(network, image[None])
    shares = [round(value, 5) for value in check_finite(logits)[0].softmax(0).tolist()]
    pictures = {"28 × 28, as the network gets it": image[0].numpy()}
    pictures |= {title: draw_maps(values.numpy()) for title, values in maps.items()}
    return {
        "probabilities": list(zip(network.data.classes, shares, strict=True)),
        "pictures": [(title, to_url(pixels)) for title, pixels in pictures.items()],
    }


@torch.inference_mode()
def predict_with_maps(network: TorchPredictor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [N, classes] of images uint8 [N, 1, H, W], and feature maps of the first image.

    Convolutional networks: the outputs of the first convolution and of the first activation. LLTM:
    the state after each row. Maps are [count, H, W].
    """
    module, output = network.module, network.normalize(images)
    if isinstance(module, LLTMClassifier):
        states, _ = module.rows(output[:1].squeeze(1))
        return network.logits(images), {"State after each row": states}
    module, maps = cast(ConvNet, module), {}
    for index, layer in enumerate(module.features):
        output = layer(output)
        if index == 0:
            maps["First convolution"] = output[0]
        if type(layer) in NAMES and len(maps) == 1:
            maps[f"First {NAMES[type(layer)]}"] = output[0]
    return module.classifier(output), maps


def draw_maps(maps: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Draw maps [count, H, W] in rows, in colours from NEGATIVE over ZERO to POSITIVE: RGB."""
    columns = min(len(maps), max(COLUMNS, math.ceil(math.sqrt(2 * len(maps)))))
    rows = -(-len(maps) // columns)
    maps = np.pad(maps, ((0, rows * columns - len(maps)), (1, 1), (1, 1)))
    maps = np.concatenate([np.concatenate([*row], 1) for row in np.split(maps, rows)])[..., None]
    share = (np.abs(maps) / max(float(np.abs(maps).max()), 1e-12)) ** CONTRAST
    colours = ZERO + share * (np.where(maps > 0, POSITIVE, NEGATIVE) - ZERO)
    return colours.round().astype(np.uint8)


def to_url(pixels: NDArray[np.uint8]) -> str:
    """Return a picture, gray [H, W] or RGB [H, W, 3], as the data URL of a PNG."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
