"""Plots of predictions, for predictions.png and TensorBoard."""

import io
import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.inference.metrics import Predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = NDArray[np.uint8]  # RGB, [H, W, 3]
DPI = 100
COLUMNS = 10  # images in a row
TILE, GAP, CAPTION, TITLE = 0.78, 0.12, 0.36, 0.5  # inches: image, space between images, texts
RIGHT, WRONG = "#2e7d32", "#c62828"
PREDICTIONS, MISTAKES = 100, 50  # images shown at most
MIN_SCALE = 10  # the color scale ends at this count or a larger one


def draw_predictions(predictions: Predictions, images: Tensor, title: str) -> bytes:
    """Return a PNG of test images: mistakes, most confident first, then least confident hits."""
    png = io.BytesIO()
    _grid(predictions, images, predictions.order[:PREDICTIONS], title).savefig(png, dpi=DPI)
    return png.getvalue()


def draw_mistakes(predictions: Predictions, images: Tensor) -> Picture:
    """Draw the misclassified images uint8 [N, 1, H, W], most confident first."""
    wrong = int(predictions.mistakes.sum())
    order = predictions.order[: min(wrong, MISTAKES)]
    title = f"{wrong:,} of {len(predictions.labels):,} images wrong"
    return _to_array(_grid(predictions, images, order, title))


def draw_confusion(predictions: Predictions) -> Picture:
    """Draw the confusion matrix: rows are true classes, columns predictions; mistakes are red."""
    counts, names = predictions.confusion.numpy(), [name[:12] for name in predictions.classes]
    wrong = counts - np.diag(counts.diagonal())
    side = 1.6 + 0.46 * len(names)
    figure = _figure(side, side + 0.3)
    axes = figure.add_subplot()
    darkest = 1.7 * max(MIN_SCALE, wrong.max()) ** 0.5  # not too dark for the numbers
    axes.imshow(np.sqrt(wrong), cmap="Reds", vmin=0, vmax=darkest)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) > 3 else 0)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(f"{wrong.sum():,} of {counts.sum():,} images wrong", fontsize=11)
    return _to_array(figure)


def _grid(predictions: Predictions, images: Tensor, order: Tensor, title: str) -> "Figure":
    """Draw the images of `order` in rows, with the prediction and, if wrong, the true class."""
    captions = [_captions(predictions, index) for index in order.tolist()]
    longest = max((len(text) for pair in captions for text in pair), default=0)
    width = max(TILE, 0.075 * longest) + GAP
    height = TILE + CAPTION + GAP
    columns, rows = min(COLUMNS, max(1, len(order))), -(-len(order) // COLUMNS)
    total = max(columns * width + GAP, 0.12 * len(title) + GAP), rows * height + TITLE
    figure = _figure(*total, constrained=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.text(GAP, 0.3, title, fontsize=13, va="center")
    for position, (index, (prediction, truth)) in enumerate(
        zip(order.tolist(), captions, strict=True)
    ):
        row, column = divmod(position, COLUMNS)
        x, y = GAP / 2 + (column + 0.5) * width, TITLE + row * height
        extent = (x - TILE / 2, x + TILE / 2, y + TILE, y)
        axes.imshow(images[index, 0].numpy(), cmap="gray", vmin=0, vmax=255, extent=extent)
        color = WRONG if truth else RIGHT
        axes.text(x, y + TILE + 0.04, prediction, color=color, fontsize=9, ha="center", va="top")
        axes.text(x, y + TILE + 0.21, truth, fontsize=9, ha="center", va="top")
    axes.set(xlim=(0, total[0]), ylim=(total[1], 0))
    axes.set_axis_off()
    return figure


def _captions(predictions: Predictions, index: int) -> tuple[str, str]:
    """Return the prediction with its confidence, and the true class if it differs."""
    names = predictions.classes
    predicted, label = int(predictions.predicted[index]), int(predictions.labels[index])
    caption = f"{names[predicted]} ({float(predictions.confidence[index]):.0%})"
    return caption, "" if predicted == label else f"is {names[label]}"


def _figure(width: float, height: float, constrained: bool = True) -> "Figure":
    """Return an empty figure, size in inches, that needs no display."""
    # a first run logs, as information, that it makes a font cache
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: takes half a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if constrained else None)
    FigureCanvasAgg(figure)
    return figure


def _to_array(figure: "Figure") -> Picture:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()  # type: ignore[attr-defined]
