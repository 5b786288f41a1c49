import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from app.inference import plots
from app.inference.metrics import Predictions


def confused(labels, predicted, classes=("cat", "dog", "Ankle boot")):
    wide = torch.linspace(0.5, 1, len(labels))
    return Predictions(list(classes), torch.tensor(labels), torch.tensor(predicted), wide)


@pytest.fixture
def figures(monkeypatch):
    """Return the list of figures that the plots add to."""
    drawn = []

    class Recorded(Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            drawn.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure", Recorded)
    return drawn


def texts(figure):
    """Return the visible texts of a figure."""
    return [item.get_text() for item in figure.findobj(lambda item: hasattr(item, "get_text"))]


def outside(figure):
    """Return the texts that extend beyond the figure."""
    renderer, frame = figure.canvas.get_renderer(), figure.bbox
    items = figure.findobj(lambda item: hasattr(item, "get_text") and item.get_text())
    boxes = {item.get_text(): item.get_window_extent(renderer) for item in items}
    return [
        text
        for text, box in boxes.items()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > frame.x1 + 1 or box.y1 > frame.y1 + 1
    ]


def test_confusion_matrix_shades_mistakes(figures):
    picture = plots.draw_confusion(confused([0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 2, 0]))
    assert (picture.dtype, picture.shape[2]) == (np.uint8, 3)
    (axes,) = figures[0].axes
    shade = axes.images[0].to_rgba(axes.images[0].get_array())[..., :3].sum(2)
    assert shade[0, 1] < shade[2, 0] < shade[1, 0]  # 2, 1, 0 mistakes
    assert shade[0, 0] == shade[1, 1] == shade[2, 2] == shade[1, 0]
    assert shade[2, 0] > 1.8
    assert {"true class", "predicted class", "3 of 6 images wrong"} <= set(texts(figures[0]))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "Ankle boot"]
    assert outside(figures[0]) == []


def test_predictions_show_mistakes_first(figures, predictions):
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 1, 28, 28)
    png = plots.draw_predictions(predictions, images, "pets test")
    assert png.startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert [int(image.get_array()[0, 0]) for image in axes.images] == [5, 3, 1, 2, 0, 4]
    shown = [text for text in texts(figures[0]) if text]
    assert shown[:5] == ["pets test", "cat (80%)", "is dog", "dog (60%)", "is a long name"]
    assert sum(text.startswith("is ") for text in shown) == 2
    colors = {t.get_text(): t.get_color() for t in axes.texts}
    assert (colors["cat (80%)"], colors["a long name (70%)"]) == (plots.WRONG, plots.RIGHT)
    assert outside(figures[0]) == []


def test_mistakes_shows_only_mistakes(figures, predictions):
    images = torch.zeros(6, 1, 28, 28, dtype=torch.uint8)
    plots.draw_mistakes(predictions, images)
    assert len(figures[0].axes[0].images) == 2
    assert "2 of 6 images wrong" in texts(figures[0])


def test_plots_without_mistakes(figures):
    perfect = confused([0, 1], [0, 1])
    images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    for picture in (plots.draw_mistakes(perfect, images), plots.draw_confusion(perfect)):
        assert picture.size > 0
    assert plots.draw_predictions(perfect, images, "pets").startswith(b"\x89PNG")
    assert all(outside(figure) == [] for figure in figures)
