import sys

import torch
from torch import Tensor

from app.config.errors import UserError
from app.config.schema import PredictConfig, shown
from app.data.datasets import load_test_split
from app.inference.image_io import Gray, read_pictures
from app.inference.metrics import Predictions
from app.inference.output import describe, format_confusion, print_pictures, to_csv, to_json
from app.inference.plots import draw
from app.inference.predictor import Predictor, load_predictor
from app.inference.preprocess import SIDE, bright_on_black, frame
from app.models import LEAST_SIDE
from app.runs.files import print_and_write


def predict(cfg: PredictConfig) -> None:
    """Predict as `cfg` says: the pictures that `input` names or, without, the test split.

    Raises:
        UserError: The network, the pictures, the data or the device cannot be used.
        RunError: The results cannot be written.
    """
    for key in ("frame", "invert"):
        value = getattr(cfg, key)
        if cfg.input is None and value != getattr(PredictConfig(), key):
            raise UserError(f"{key}={shown(value)}: is for pictures, name them with input=...")
    network = load_predictor(cfg.checkpoint, cfg.outputs, cfg.runtime, cfg.device)
    if cfg.input is not None:
        names, images = read_images(cfg, network)
        batches = [torch.stack(images)] if cfg.frame else [image[None] for image in images]
        probabilities = torch.cat([network.logits(batch) for batch in batches]).softmax(1)
        print_pictures(names, probabilities, network.classes, cfg.format)
        return
    split = load_test_split(network.dataset, cfg.data.root)
    confidence, predicted = network.logits(split.images).softmax(1).max(1)
    predictions = Predictions(network.classes, split.labels, predicted, confidence)
    instead = f" (instead of {network.fallback_from})" if network.fallback_from else ""
    name = network.dataset + instead
    text = table = to_csv(predictions)
    if cfg.format == "json":
        text = to_json(predictions, network.dataset) + "\n"
    elif cfg.format == "table":
        text = f"{describe(predictions, name)}\n\n{format_confusion(predictions)}\n\n"
    told = sys.stdout if cfg.format == "table" else sys.stderr  # the others are for programs
    files = {"predictions.csv": table.encode(), "predictions.png": draw(predictions, split, name)}
    print_and_write(text, network.folder, files, told)


def read_images(cfg: PredictConfig, network: Predictor) -> tuple[list[str], list[Tensor]]:
    """Read the pictures that `cfg.input` names, framed as those that the network was trained on.

    Returns:
        The pictures' names, and images uint8 [1, 28, 28]; with `frame=false` [1, H, W].

    Raises:
        UserError: There are none, one of them cannot be read, is blank, or of a size that the
            network does not take.
    """
    names, images = [], []
    for name, gray in read_pictures(str(cfg.input)):
        if cfg.frame:
            image = frame(gray, network.dataset, cfg.invert)
        else:
            check_size(name, gray, network)
            image = bright_on_black(gray, cfg.invert)
        if image is None:
            found = "a blank picture, there is nothing in it"
            if cfg.invert is not None:
                found = f"nothing in it with invert={shown(cfg.invert)}, leave that out"
            raise UserError(f"input={name}: {found}")
        names.append(name)
        images.append(image)
    return names, images


def check_size(name: str, gray: Gray, network: Predictor) -> None:
    """Raise UserError if the network does not take a picture of this size."""
    height, width = gray.shape
    if network.any_size:
        allowed, fits = f"at least {LEAST_SIDE}x{LEAST_SIDE}", min(gray.shape) >= LEAST_SIDE
    else:
        allowed, fits = f"{SIDE}x{SIDE}", gray.shape == (SIDE, SIDE)
    if not fits:
        raise UserError(
            f"input={name}: {width}x{height} pixels; with frame=false this network takes {allowed}"
        )
