"""Pictures of a trained network for TensorBoard, as RGB arrays uint8 [H, W, 3]."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from app.figures import GAP, INK, PAPER, Tile, draw_grid
from app.results import Predictions

Picture = NDArray[np.uint8]

CELL = 44  # pixels of a cell of the confusion matrix
DOT = 16  # pixels of a weight of a filter
MISTAKES = 50  # shown at most
MANY = 10  # mistakes of a kind: fewer are never of the darkest red
RED, WHITE, BLUE = (178, 24, 43), (255, 255, 255), (33, 102, 172)
EDGE = 160  # gray around a filter: its weights near 0 are as white as the paper


def draw_filters(model: nn.Module) -> Picture | None:
    """The filters of the first convolution that spans pixels: red below 0, white 0, blue above.

    None: the network has no such convolution.
    """
    filters = (p.detach().cpu() for p in model.parameters() if p.ndim == 4 and p.shape[-1] > 1)
    weight = next(filters, None)
    if weight is None:
        return None
    weight = weight.flatten(0, 1)
    shade = (weight / weight.abs().max().clamp_min(1e-12)).unsqueeze(-1)
    red, white, blue = (torch.tensor(color, dtype=torch.float32) for color in (RED, WHITE, BLUE))
    colors = torch.where(shade < 0, white + (white - red) * shade, white + (blue - white) * shade)
    tiles = colors.round().to(torch.uint8).numpy().repeat(DOT, 1).repeat(DOT, 2)
    count, height, width, _ = tiles.shape
    sheet = np.full((height + 2 * GAP, count * (width + GAP) + GAP, 3), 255, np.uint8)
    for index, tile in enumerate(tiles):
        left = GAP + index * (width + GAP)
        sheet[GAP - 1 : GAP + height + 1, left - 1 : left + width + 1] = EDGE
        sheet[GAP : GAP + height, left : left + width] = tile
    return sheet


def draw_confusion(predictions: Predictions) -> Picture:
    """The confusion matrix: rows are classes, columns predictions, mistakes the darker the more."""
    counts, names = predictions.confusion, [name[:12] for name in predictions.classes]
    font, bold = ImageFont.load_default(14), ImageFont.load_default(16)
    margin = int(max(font.getlength(name) for name in names)) + 2 * GAP
    size = len(names) * CELL
    top = CELL + 2 * GAP + 20
    sheet = Image.new("RGB", (margin + size + GAP, top + size + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((margin + size // 2, GAP), "predicted", INK, bold, anchor="ma")
    draw.text((GAP, GAP), "is", INK, bold)
    worst = max(MANY, int((counts - counts.diag().diag()).max()))
    for row, name in enumerate(names):
        middle = row * CELL + CELL // 2
        draw.text((margin - GAP, top + middle), name, INK, font, anchor="rm")
        draw.text((margin + middle, top - GAP), _short(name), INK, font, anchor="ms")
        for column, count in enumerate(counts[row].tolist()):
            share = count / worst if row != column else 0.0
            color = tuple(round(255 + (dark - 255) * min(1.0, share) ** 0.5) for dark in RED)
            color = (223, 240, 216) if row == column else color
            left, upper = margin + column * CELL, top + row * CELL
            draw.rectangle((left, upper, left + CELL - 2, upper + CELL - 2), color)
            center = left + CELL // 2 - 1, upper + CELL // 2 - 1
            ink = PAPER if share > 0.4 else INK
            draw.text(center, f"{count:,}" if count else "", ink, font, anchor="mm")
    return np.asarray(sheet)


def draw_mistakes(predictions: Predictions, images: Tensor) -> Picture:
    """The images uint8 [N, 1, H, W] that were taken for something else, the surest first."""
    wrong = predictions.mistakes.nonzero().flatten()
    order = wrong[predictions.confidence[wrong].argsort(descending=True)][:MISTAKES]
    tiles = [_tile(predictions, images, index) for index in order.tolist()]
    title = f"{len(wrong):,} of {len(predictions.labels):,} images wrong"
    return np.asarray(draw_grid(title, tiles))


def _tile(predictions: Predictions, images: Tensor, index: int) -> Tile:
    names: Sequence[str] = predictions.classes
    predicted, label = (
        int(values[index]) for values in (predictions.predicted, predictions.labels)
    )
    caption = f"{names[predicted]} ({float(predictions.confidence[index]):.0%})"
    return Tile(images[index, 0].numpy(), caption, names[label])


def _short(name: str) -> str:
    return name if len(name) <= 5 else name[:4] + "."
