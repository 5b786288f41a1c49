"""Plots of predictions, for predictions.png and TensorBoard."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from app.inference.metrics import Predictions

Picture = NDArray[np.uint8]  # RGB, [H, W, 3]
FONT = ImageFont.load_default(13)
COLUMNS = 10  # images in a row
TILE, GAP, LINE, TITLE = 84, 12, 17, 48  # pixels: image, space between images, line of text, title
CELL = 46  # pixels of a cell of the confusion matrix
RIGHT, WRONG = "#2e7d32", "#c62828"
PREDICTIONS, MISTAKES = 100, 50  # images shown at most
MIN_SCALE = 10  # the color scale ends at this count or a larger one


def draw_predictions(predictions: Predictions, images: Tensor, title: str) -> bytes:
    """Return a PNG of test images: mistakes, most confident first, then least confident hits."""
    png = io.BytesIO()
    _grid(predictions, images, predictions.order[:PREDICTIONS], title).save(png, "PNG")
    return png.getvalue()


def draw_mistakes(predictions: Predictions, images: Tensor) -> Picture:
    """Draw the misclassified images uint8 [N, 1, H, W], most confident first."""
    wrong = int(predictions.mistakes.sum())
    order = predictions.order[: min(wrong, MISTAKES)]
    title = f"{wrong:,} of {len(predictions.labels):,} images wrong"
    if wrong > MISTAKES:
        title += f", the most confident {MISTAKES} shown"
    return np.asarray(_grid(predictions, images, order, title))


def draw_confusion(predictions: Predictions) -> Picture:
    """Draw the confusion matrix: rows are true classes, columns predictions; mistakes are red."""
    counts, names = predictions.confusion.numpy(), predictions.classes
    wrong = counts - np.diag(counts.diagonal())
    title = f"{wrong.sum():,} of {counts.sum():,} images wrong"
    width = max(CELL, *map(_width, names)) + 2 * GAP
    picture, draw = _canvas((len(names) + 1) * width, (len(names) + 1) * CELL, title)
    darkest = 1.7 * max(MIN_SCALE, wrong.max()) ** 0.5  # not too dark for the numbers
    for (row, column), count in np.ndenumerate(counts):
        x, y = (column + 1) * width, TITLE + row * CELL
        paler = round(255 * (1 - wrong[row, column] ** 0.5 / darkest))
        draw.rectangle((x, y, x + width - 1, y + CELL - 1), (255, paler, paler), "#dddddd")
        if count:
            draw.text((x + width / 2, y + CELL / 2), f"{count:,}", "black", anchor="mm")
    for index, name in enumerate(names):
        row, column = TITLE + (index + 0.5) * CELL, (index + 1.5) * width
        draw.text((width - GAP, row), name, "black", anchor="rm")
        draw.text((column, TITLE + (len(names) + 0.5) * CELL), name, "black", anchor="mm")
    draw.text((width - GAP, TITLE - 8), "true", "gray", anchor="rm")
    draw.text((width - GAP, TITLE + (len(names) + 0.5) * CELL), "predicted", "gray", anchor="rm")
    return np.asarray(picture)


def _grid(predictions: Predictions, images: Tensor, order: Tensor, title: str) -> Image.Image:
    """Draw the images of `order` in rows, with the prediction and, if wrong, the true class."""
    captions = [_captions(predictions, index) for index in order.tolist()]
    width = max([TILE, *(_width(text) for pair in captions for text in pair)]) + GAP
    height = TILE + 2 * LINE + GAP
    rows = -(-len(captions) // COLUMNS)
    picture, draw = _canvas(min(COLUMNS, len(captions)) * width, rows * height, title)
    for position, (prediction, truth) in enumerate(captions):
        row, column = divmod(position, COLUMNS)
        x, y = column * width + width // 2, TITLE + row * height
        image = Image.fromarray(images[order[position], 0].numpy())
        picture.paste(image.resize((TILE, TILE), Image.Resampling.NEAREST), (x - TILE // 2, y))
        draw.text((x, y + TILE + 2), prediction, WRONG if truth else RIGHT, anchor="ma")
        draw.text((x, y + TILE + 2 + LINE), truth, "black", anchor="ma")
    return picture


def _captions(predictions: Predictions, index: int) -> tuple[str, str]:
    """Return the prediction with its confidence, and the true class if it differs."""
    names = predictions.classes
    predicted, label = int(predictions.predicted[index]), int(predictions.labels[index])
    caption = f"{names[predicted]} ({float(predictions.confidence[index]):.0%})"
    return caption, "" if predicted == label else f"is {names[label]}"


def _canvas(width: int, height: int, title: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return a white picture of `width` x `height` pixels below a title."""
    picture = Image.new("RGB", (max(width, _width(title)) + 2 * GAP, TITLE + height), "white")
    draw = ImageDraw.Draw(picture)
    draw.font = FONT
    draw.text((GAP, TITLE / 2), title, "black", anchor="lm")
    return picture, draw


def _width(text: str) -> int:
    """Return the width of a text in pixels."""
    return int(FONT.getlength(text)) + 1
