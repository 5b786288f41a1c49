"""Choose test images to try a network on."""

import base64
import functools
from typing import Any

import torch

from app.data.datasets import load_test_split
from app.inference.metrics import Predictions
from app.inference.predictor import Predictor

MISTAKES, IMAGES = 40, 60  # largest numbers of mistakes and of all images


_test_split = functools.lru_cache(maxsize=4)(load_test_split)


@functools.lru_cache(maxsize=16)
def choose_samples(network: Predictor, data_root: str) -> list[dict[str, Any]]:
    """Choose test images for a network: confident mistakes first, then hits.

    Return for each the label, the predicted class, whether they differ, and the pixels (28x28
    bytes in base64). Raise a UserError if the data set cannot be used.
    """
    split = _test_split(network.dataset, data_root)
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
