"""Read the picture of a request and predict it."""

import base64
import io
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from app.config.errors import UserError
from app.inference.image_io import Gray, read_gray
from app.inference.predictor import TorchPredictor, check_finite
from app.inference.preprocess import frame
from app.web.feature_maps import predict_with_maps
from app.web.networks import load_network

MAX_PIXELS = 4096 * 4096  # per picture; a small PNG file may decompress to gigabytes


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
