"""Predict the drawing of a request."""

import base64
import time
from pathlib import Path
from typing import Any

import numpy as np

from app.config.errors import UserError
from app.inference.predictor import TorchPredictor, check_finite
from app.inference.preprocess import frame
from app.web.feature_maps import predict_with_maps
from app.web.networks import load_network

SIDE = 140  # pixels of a drawing, as in page/drawing.js


def predict_drawing(path: Path, body: bytes) -> dict[str, Any]:
    """Predict a drawing, gray bytes of SIDE × SIDE pixels, with the network in `path`.

    Return `classes`, `class`, `probabilities`, `image` (the input in base64), `maps` (feature maps
    of the first layers; None for an exported file) and `milliseconds`. For a blank drawing all but
    the first and last are None. Raise a UserError if the network or the drawing cannot be used.
    """
    if len(body) != SIDE**2:
        raise UserError(f"{len(body)} bytes are not a drawing of {SIDE}x{SIDE} gray pixels")
    network, start = load_network(path), time.perf_counter()
    image = frame(np.frombuffer(body, np.uint8).reshape(SIDE, SIDE), network.dataset)
    between = time.perf_counter()
    result: dict[str, Any] = {"classes": network.classes, "class": None, "probabilities": None}
    result |= {"image": None, "maps": None}
    if image is not None:
        if isinstance(network, TorchPredictor):
            logits, result["maps"] = predict_with_maps(network, image[None])
            check_finite(logits)
        else:
            logits = network.logits(image[None])
        probabilities = logits[0].softmax(0)
        result["class"] = network.classes[int(probabilities.argmax())]
        result["probabilities"] = [round(value, 5) for value in probabilities.tolist()]
        result["image"] = base64.b64encode(image.numpy().tobytes()).decode()
    end = time.perf_counter()
    result["milliseconds"] = {
        "framing": round(1e3 * (between - start), 2),
        "network": round(1e3 * (end - between), 2),
    }
    return result
