"""Feature maps of the first layers, and their picture."""

import numpy as np
import pytest
import torch

from app.config.schema import SeparableConfig
from app.inference.predictor import load_torch
from app.web.answer import NEGATIVE, POSITIVE, ZERO, draw_maps, predict_with_maps
from tests.app.idx import random_images


@pytest.mark.parametrize(("channels", "layers"), [([[8], [8], [8]], 3), ([[8, 4], [8], [8]], 2)])
def test_maps_of_separable_networks(make_run, channels, layers):
    network, images = load_torch(make_run(model=SeparableConfig(channels))), random_images(1)
    logits, maps = predict_with_maps(network, images)
    assert np.array_equal(logits, network.logits(images))
    assert list(maps) == ["First convolution", "First gelu"]
    for values, count in zip(maps.values(), (1, layers), strict=True):
        expected = network.module.features[:count](network.normalize(images))[0]
        torch.testing.assert_close(values, expected)


def test_colours_and_places_of_maps():
    maps = np.zeros((7, 2, 3), np.float32)
    maps[1, 0, 2], maps[6, 1, 0] = 5, -5
    picture = draw_maps(maps)  # six in a row, a pixel around each
    assert picture.shape == (2 * 4, 6 * 5, 3)
    assert picture[1, 5 + 3].tolist() == POSITIVE.tolist()
    assert picture[4 + 2, 1].tolist() == NEGATIVE.tolist()
    assert (picture == ZERO).all(-1).sum() == 2 * 4 * 6 * 5 - 2
