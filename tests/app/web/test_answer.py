"""Feature maps of the first layers."""

import base64

import numpy as np
import pytest

from app.config.schema import SeparableConfig
from app.inference.predictor import load_torch
from app.web.answer import predict_with_maps
from tests.app.idx import random_images


@pytest.mark.parametrize(
    ("channels", "layers", "title"),
    [([[8], [8], [8]], 3, "After pooling and gelu"), ([[8, 4], [8], [8]], 2, "After gelu")],
)
def test_maps_of_separable_networks(make_run, channels, layers, title):
    network, images = load_torch(make_run(model=SeparableConfig(channels))), random_images(1)
    logits, maps = predict_with_maps(network, images)
    assert np.array_equal(logits, network.logits(images))
    assert [group["title"] for group in maps] == ["First convolution", title]
    for group, count in zip(maps, (1, layers), strict=True):
        values = network.module.features[:count](network.normalize(images))[0]
        shown = np.frombuffer(base64.b64decode(group["values"]), np.int8).reshape(values.shape)
        step = values.abs().max().item() / 127
        np.testing.assert_allclose(shown * step, values.detach().numpy(), atol=0.51 * step)
