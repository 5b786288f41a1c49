from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

TILE = 84  # pixels an image is wide and high: three times MNIST's
GAP = 10
LINE = 16
COLUMNS = 10
PAPER, INK, RIGHT, WRONG = "#ffffff", "#202020", "#2e7d32", "#c62828"


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
