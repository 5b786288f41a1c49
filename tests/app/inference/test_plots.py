import numpy as np
import pytest
import torch

from app.config.schema import LeNetConfig
from app.inference.metrics import Predictions
from app.inference.plots import (
    BLUE,
    CELL,
    DOT,
    GAP,
    RED,
    draw_confusion,
    draw_filters,
    draw_mistakes,
)
from app.models import build_model


@pytest.mark.parametrize(("conv", "count"), [("standard", 6), ("depthwise", 1)])
def test_filters(conv, count):
    model = build_model(LeNetConfig(conv=conv), 10)
    weight = next(p for p in model.parameters() if p.ndim == 4 and p.shape[-1] == 5)
    with torch.no_grad():
        weight.fill_(0)
        weight[0, 0, 0, 0], weight[0, 0, 4, 4] = 2.0, -2.0
    picture = draw_filters(model)
    assert picture.dtype == np.uint8
    assert picture.shape == (5 * DOT + 2 * GAP, count * (5 * DOT + GAP) + GAP, 3)
    assert tuple(picture[GAP, GAP]) == BLUE
    assert tuple(picture[GAP + 5 * DOT - 1, GAP + 5 * DOT - 1]) == RED
    assert (picture[GAP + 2 * DOT, GAP + 2 * DOT] == 255).all()
    assert (picture[GAP - 1, GAP : GAP + 5 * DOT] < 200).all()  # its border


@pytest.mark.parametrize("kind", [{"name": "lltm"}, {"conv": "involution"}], ids=str)
def test_a_network_without_filters(kind):
    assert draw_filters(build_model(LeNetConfig(**kind), 10)) is None


def predictions(labels, predicted, classes=("cat", "dog", "Ankle boot")):
    wide = torch.linspace(0.5, 1, len(labels))
    return Predictions(list(classes), torch.tensor(labels), torch.tensor(predicted), wide)


def test_confusion_is_dark_where_mistakes_are():
    picture = draw_confusion(predictions([0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 2, 0]))
    assert picture.shape[0] > 3 * CELL
    cells = picture[-3 * CELL - GAP : -GAP, -3 * CELL - GAP : -GAP]
    shade = cells[2::CELL, 2::CELL].astype(int).sum(2)  # a corner of each cell
    assert shade[0, 1] < shade[2, 0] < shade[1, 0] == 3 * 255  # twice, once, never
    assert shade[0, 0] == shade[1, 1] == shade[2, 2]
    assert shade[2, 0] > 500  # one mistake is no alarm


def test_mistakes_are_the_wrong_ones():
    images = torch.zeros(6, 1, 28, 28, dtype=torch.uint8)
    one = draw_mistakes(predictions([0, 1], [0, 0]), images)
    two = draw_mistakes(predictions([0, 1, 2], [0, 0, 1]), images)
    assert two.shape[1] >= one.shape[1]
    none = draw_mistakes(predictions([0, 1], [0, 1]), images)
    assert none.shape[0] < one.shape[0]
