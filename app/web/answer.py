"""Read the picture of a request and predict it."""

import base64
import io
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


def read_picture(body: bytes, width: int | None) -> Gray:
    """Read the picture of a request: a PNG file or, with `width`, raw 8-bit gray rows.

    Raise a UserError if the body is malformed or the picture too large.
    """
    if width is not None:
        if not body or len(body) % width:
            raise UserError(f"{len(body)} bytes are not rows of width={width}")
        return np.frombuffer(body, np.uint8).reshape(-1, width)
    if not body.startswith(b"\x89PNG"):
        raise UserError("not a PNG picture; with width=... gray bytes are taken, too")
    return read_gray(io.BytesIO(body), MAX_PIXELS, ["PNG"])


def predict_picture(path: Path, gray: Gray) -> dict[str, Any]:
    """Predict a picture with the network in `path`, framed as in `python -m app.predict`.

    Return `classes`, `class`, `probabilities`, `image` (the input in base64), `maps` (feature maps
    of the first layers; None for an exported file) and `milliseconds`. For a blank picture all but
    `classes` and `milliseconds` are None. Raise a UserError if the network cannot be used.
    """
    network, start = load_network(path), time.perf_counter()
    image = frame(gray, network.dataset)
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
