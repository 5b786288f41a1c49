"""Pictures of a network and of its predictions."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from app.data.datasets import Split
from app.inference.metrics import Predictions
from app.inference.output import describe

TILE = 84  # pixels an image is wide and high: three times MNIST's
GAP = 10
LINE = 16
COLUMNS = 10
PAPER, INK, RIGHT, WRONG = "#ffffff", "#202020", "#2e7d32", "#c62828"
Picture = NDArray[np.uint8]
CELL = 44  # pixels of a cell of the confusion matrix
DOT = 16  # pixels of a weight of a filter
MISTAKES = 50  # shown at most
MANY = 10  # mistakes of a kind: fewer are never of the darkest red
RED, WHITE, BLUE = (178, 24, 43), (255, 255, 255), (33, 102, 172)
EDGE = 160  # gray around a filter: its weights near 0 are as white as the paper
TILES = 10 * COLUMNS  # images in predictions.png


@dataclass
class Tile:
    """One image of a grid, with what was predicted for it.

    Attributes:
        image: Shades of gray, uint8 [H, W].
        caption: The prediction.
        truth: What it should have been; None when the prediction is right.
    """

    image: NDArray[np.uint8]
    caption: str
    truth: str | None


def draw_grid(title: str, tiles: Sequence[Tile]) -> Image.Image:
    """Draw images in rows, each over its prediction: green if right, red with the truth if not."""
    font, bold = ImageFont.load_default(13), ImageFont.load_default(20)
    captions = [text for tile in tiles for text in (tile.caption, _truth(tile))]
    width = max([TILE, *(int(font.getlength(text)) + 4 for text in captions)]) + GAP
    height, rows = TILE + 2 * LINE + GAP, -(-len(tiles) // COLUMNS)
    columns = min(COLUMNS, len(tiles))
    top = 2 * GAP + 24
    size = max(columns * width, int(bold.getlength(title)) + GAP) + GAP, top + rows * height
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), title, INK, bold)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, COLUMNS)
        middle, y = GAP + column * width + (width - GAP) // 2, top + row * height
        image = Image.fromarray(tile.image).resize((TILE, TILE), Image.Resampling.NEAREST)
        sheet.paste(image, (middle - TILE // 2, y))
        color = RIGHT if tile.truth is None else WRONG
        draw.text((middle, y + TILE + 2), tile.caption, color, font, anchor="ma")
        draw.text((middle, y + TILE + 2 + LINE), _truth(tile), INK, font, anchor="ma")
    return sheet


def _truth(tile: Tile) -> str:
    return "" if tile.truth is None else f"is {tile.truth}"


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


def draw(predictions: Predictions, split: Split, name: str) -> bytes:
    """A PNG of the mistakes, the surest first, and then of the least sure of the right ones."""
    wrong, confidence = predictions.mistakes, predictions.confidence
    order = torch.where(wrong, -1 - confidence, confidence).argsort()[:TILES]
    tiles = []
    for index in order.tolist():
        label, predicted = predictions.labels[index], predictions.predicted[index]
        image: NDArray[np.uint8] = split.images[index, 0].numpy()
        caption = f"{predictions.classes[predicted]} ({confidence[index]:.0%})"
        tiles.append(Tile(image, caption, predictions.classes[label] if wrong[index] else None))
    png = io.BytesIO()
    draw_grid(describe(predictions, name), tiles).save(png, "PNG", optimize=True)
    return png.getvalue()
