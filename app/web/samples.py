"""Choose test images to try a network on."""

import base64
import functools
from pathlib import Path
from typing import Any

import torch

from app.data.datasets import load_test_split
from app.inference.metrics import Predictions
from app.inference.predictor import Predictor
from app.runs.folder import data_root
from app.web.networks import load_network

MISTAKES, IMAGES = 40, 60  # largest numbers of mistakes and of all images


def choose_samples(path: Path, root: str | None) -> list[dict[str, Any]]:
    """Choose test images for the network in `path`: confident mistakes first, then hits.

    Return for each the label, the predicted class, whether they differ, and the pixels (28x28
    bytes in base64). `root` None: the `data.root` of the network's run. Raise a UserError if the
    network or its data set cannot be used.
    """
    return _choose(load_network(path), data_root(path.parent, root))


_test_split = functools.lru_cache(maxsize=4)(load_test_split)


@functools.lru_cache(maxsize=16)
def _choose(network: Predictor, root: str) -> list[dict[str, Any]]:
    split = _test_split(network.dataset, root)
    logits = network.logits(split.images)
    predictions = Predictions.of(network.classes, split.labels, logits)
    wrong, predicted = predictions.mistakes, predictions.predicted
    mistakes = predictions.order[: min(int(wrong.sum()), MISTAKES)].tolist()
    right = torch.nonzero(~wrong).flatten().tolist()[: IMAGES - len(mistakes)]
    return [
        {
            "label": network.classes[split.labels[index]],
            "answer": network.classes[predicted[index]],
            "mistake": bool(wrong[index]),
            "pixels": base64.b64encode(split.images[index].numpy().tobytes()).decode(),
        }
        for index in (*mistakes, *right)
    ]
