import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from app.inference import plots
from app.inference.metrics import Predictions


def confused(labels, predicted, classes=("cat", "dog", "Ankle boot")):
    wide = torch.linspace(0.5, 1, len(labels))
    return Predictions(list(classes), torch.tensor(labels), torch.tensor(predicted), wide)


@pytest.fixture
def texts(monkeypatch):
    """Return the texts that the plots draw, with their colours; fail if one leaves its picture."""
    drawn, text = {}, ImageDraw.ImageDraw.text

    def record(self, xy, content, fill, anchor):
        left, top, right, bottom = self.textbbox(xy, content, anchor=anchor)
        assert min(left, top) >= 0 and right <= self.im.size[0] and bottom <= self.im.size[1]
        drawn[content] = fill
        text(self, xy, content, fill, anchor=anchor)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", record)
    return drawn


def tiles(picture):
    """Return the gray levels of the uniform images in a picture, row by row."""
    gray = np.asarray(picture)[plots.TITLE + plots.TILE // 2, :, 0]
    edges = np.flatnonzero(np.diff(gray.astype(int)))
    return [int(gray[edge + 1]) for edge in edges if gray[edge + 1] != 255]


def test_confusion_matrix_shades_mistakes(texts):
    names = ("cat", "dog", "Ankle boot")
    picture = plots.draw_confusion(confused([0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 2, 0], names))
    assert (picture.dtype, picture.shape[2]) == (np.uint8, 3)
    width = max(plots.CELL, *map(plots._width, names)) + 2 * plots.GAP

    def shade(row, column):
        return int(picture[plots.TITLE + row * plots.CELL + 5, (column + 1) * width + 5].sum())

    assert shade(0, 1) < shade(2, 0) < shade(1, 0)  # 2, 1, 0 mistakes
    assert shade(0, 0) == shade(1, 1) == shade(2, 2) == shade(1, 0)
    assert shade(2, 0) > 1.8 * 255
    assert {"3 of 6 images wrong", "true", "predicted", "2", *names} <= {*texts}


def test_predictions_show_mistakes_first(texts, predictions):
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 1, 28, 28)
    png = plots.draw_predictions(predictions, images, "pets test")
    assert tiles(Image.open(io.BytesIO(png))) == [5, 3, 1, 2, 0, 4]
    shown = [text for text in texts if text]
    assert shown[:5] == ["pets test", "cat (80%)", "is dog", "dog (60%)", "is a long name"]
    assert sum(text.startswith("is ") for text in shown) == 2
    assert (texts["cat (80%)"], texts["a long name (70%)"]) == (plots.WRONG, plots.RIGHT)


def test_mistakes_shows_only_mistakes(texts, predictions):
    images = torch.zeros(6, 1, 28, 28, dtype=torch.uint8)
    assert len(tiles(plots.draw_mistakes(predictions, images))) == 2
    assert "2 of 6 images wrong" in texts


def test_mistakes_title_names_the_number_of_images_shown(texts, monkeypatch, predictions):
    monkeypatch.setattr(plots, "MISTAKES", 1)
    images = torch.zeros(6, 1, 28, 28, dtype=torch.uint8)
    assert len(tiles(plots.draw_mistakes(predictions, images))) == 1
    assert "2 of 6 images wrong, the most confident 1 shown" in texts


def test_plots_without_mistakes(texts):
    perfect = confused([0, 1], [0, 1])
    images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    for picture in (plots.draw_mistakes(perfect, images), plots.draw_confusion(perfect)):
        assert picture.size > 0
    assert plots.draw_predictions(perfect, images, "pets").startswith(b"\x89PNG")
