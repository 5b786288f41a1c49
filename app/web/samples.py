"""Test images to try a network on, its mistakes first."""

import base64
import functools
from pathlib import Path
from typing import Any

import torch

from app.data.datasets import Split, load_test_split
from app.web.networks import load_network

MISTAKES, IMAGES = 40, 60  # at most that many of the images are mistakes


def samples(path: Path, data_root: str) -> list[dict[str, Any]]:
    """Choose test images: the surest mistakes first, then images of every class.

    Args:
        path: File of the network.
        data_root: Where data sets lie.

    Returns:
        Of each image its label, the network's answer, whether they differ, and its pixels, 28x28
        bytes in base64.

    Raises:
        UserError: The network or its data set cannot be used.
    """
    load_network(path)  # raises if the file is gone
    return _samples(path, path.stat().st_mtime_ns, data_root)


@functools.lru_cache(maxsize=16)
def _samples(path: Path, _modified: int, data_root: str) -> list[dict[str, Any]]:
    network = load_network(path)
    split = _test_split(network.dataset, data_root)
    confidence, predicted = network.logits(split.images).softmax(1).max(1)
    wrong = predicted != split.labels
    order = confidence.argsort(descending=True)
    mistakes = order[wrong[order]][:MISTAKES].tolist()
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


@functools.lru_cache(maxsize=4)
def _test_split(name: str, data_root: str) -> Split:
    return load_test_split(name, data_root)
