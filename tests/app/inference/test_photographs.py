"""Accuracy for photographs: a sheet on a desk, shadows, boxes, blots, lines, boards, stickers."""

import numpy as np
import pytest
import torch

from app.data.datasets import load_test_split
from app.inference.predictor import load_predictor
from app.inference.preprocess import frame
from tests.app.inference.photographs import SITUATIONS, photograph
from tests.networks import HAS_MNIST, common_folder, small_mnist, train_once

COUNT = 20  # photographs of each situation
LEAST = 17 if HAS_MNIST else 14  # of them are read right; images of digits have 8x8 pixels


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Return a network, and test images of which it reads each right."""
    folder = common_folder(tmp_path_factory)
    run = train_once(folder, "ncrelu-standard")
    predictor = load_predictor(str(run), str(run), "torch", "cpu")
    split = load_test_split(predictor.data.name, str(small_mnist(folder)))
    right = predictor.logits(split.images).argmax(1) == split.labels
    return predictor, split.images[right][:, 0].numpy(), split.labels[right].tolist()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_digits_in_photographs_are_read(network, situation):
    predictor, images, labels = network
    random = np.random.default_rng(list(situation.encode()))
    framed, expected = [], []
    for index in random.integers(0, len(labels), COUNT):
        image = frame(photograph(images[index], situation, random, side=300), predictor.data.name)
        framed.append(torch.zeros(1, 28, 28, dtype=torch.uint8) if image is None else image)
        expected.append(labels[index])
    predicted = predictor.logits(torch.stack(framed)).argmax(1)
    assert (predicted == torch.tensor(expected)).sum() >= LEAST
