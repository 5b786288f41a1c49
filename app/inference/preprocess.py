"""Preprocessing of pictures: find the digit, crop, scale and centre it as in MNIST.

MNIST's images were made by scaling each digit into a 20×20 box, keeping its proportions, and
putting its centre of mass into the centre of 28×28 (LeCun, Cortes & Burges, THE MNIST DATABASE).
"""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps
from scipy import ndimage
from torch import Tensor

from app.inference.image_io import Gray

SIDE = 28  # pixels of an MNIST image
BOX = 20  # pixels of the longer side of a digit in it
CENTRE = 14  # pixel index of a digit's centre of mass in it
FINE = 8  # oversampling of the box when the stroke width is measured
MIN_STROKE = 2  # width in pixels of the box; MNIST's median is 2.4
WORKING_SIDE = 512  # pixels; larger pictures are reduced
FIT_SIDE = 64  # samples along a side to fit the background surface
MIN_CONTRAST = 20  # of 255, between ink and background; below: blank
SPECK = 0.02  # share of the ink; smaller components are dropped
EIGHT_NEIGHBOURS = np.ones((3, 3), bool)  # connectivity of components
DIGITS = ("mnist", "qmnist", "digits")  # data sets of digits


def frame(picture: Gray, dataset: str, invert: bool | None = None) -> Tensor | None:
    """Frame a picture [H, W] as the images of a data set: uint8 [1, 28, 28], bright on black.

    `invert` tells that the ink is darker than the background; None: detect. Return None for a
    blank picture.
    """
    image = (to_digit if dataset in DIGITS else to_thumbnail)(picture, invert)
    return None if image is None else torch.from_numpy(image).unsqueeze(0)


def bright_on_black(picture: Gray, invert: bool | None) -> Tensor | None:
    """Return a picture in its own size, uint8 [1, H, W], inverted if it is dark on light.

    Return None for a blank picture.
    """
    if np.ptp(picture) < MIN_CONTRAST:
        return None
    return torch.tensor(255 - picture if _is_inverted(picture, invert) else picture).unsqueeze(0)


def to_thumbnail(gray: Gray, invert: bool | None) -> Gray | None:
    """Reduce a whole picture to [28, 28], bright on black, as Fashion-MNIST's images were made.

    The longer side becomes 28 and the background fills the rest (Xiao, Rasul & Vollgraf,
    arXiv 1708.07747, section 2).
    """
    background = _background(gray)
    small = np.asarray(_fit(Image.fromarray(gray), SIDE, enlarge=True), dtype=np.float64)
    if np.ptp(small) < MIN_CONTRAST:
        return None
    framed = np.full((SIDE, SIDE), background)
    top, left = ((SIDE - length) // 2 for length in small.shape)
    framed[top : top + small.shape[0], left : left + small.shape[1]] = small
    return (255 - framed if _is_inverted(gray, invert) else framed).round().astype(np.uint8)


def to_digit(gray: Gray, invert: bool | None = None) -> Gray | None:
    """Find the digit in a picture; crop, scale and centre it as in MNIST: [28, 28].

    With `invert=None` the ink is dark if the mean difference from the background is negative.
    Return None for a blank picture.
    """
    factor = -(-max(gray.shape) // WORKING_SIDE)
    reduced = gray if factor == 1 else np.asarray(Image.fromarray(gray).reduce(factor))
    ink = _ink(reduced, invert)
    threshold = _otsu(ink)
    strokes = ink >= threshold
    line, paper = ink[strokes], ink[~strokes]
    if not line.size or line.mean() - paper.mean() < MIN_CONTRAST:
        return None
    noise, full = np.percentile(paper, 90), np.percentile(line, 90)
    return _frame(np.clip((_crop(ink, strokes) - noise) / (full - noise), 0, 1))


def _background(gray: Gray) -> float:
    """Return the median shade of the border."""
    return float(np.median(np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])))


def _is_inverted(gray: Gray, invert: bool | None) -> bool:
    return _background(gray) > 127 if invert is None else invert


def _ink(gray: Gray, invert: bool | None) -> NDArray[np.float64]:
    """Subtract the background, a quadratic surface (uneven light); return the ink, [H, W]."""
    x, y, border, coarse, surface = _grid(*gray.shape)
    difference, samples = gray - np.median(gray.take(border)), gray[coarse].astype(np.float64)
    paper = None
    for _ in range(3):
        last, paper = paper, np.abs(difference[coarse]) <= max(8.0, np.ptp(difference) / 4)
        if last is not None and np.array_equal(last, paper):
            break  # the fit would be the same
        terms, shades = surface.compress(paper.ravel(), axis=0), samples[paper]
        # normal equations: well conditioned on [-1, 1], ten times as fast
        a, *_ = np.linalg.lstsq(terms.T @ terms, terms.T @ shades, rcond=None)
        light = (a[0] + a[1] * x + a[3] * x * x) + (a[2] * y + a[5] * y * y)
        light += a[4] * y * x
        difference = np.subtract(gray, light, out=light)
    if invert is None:
        invert = bool(difference.mean() < 0)
    return np.clip(-difference if invert else difference, 0, 255)


@functools.lru_cache(maxsize=4)
def _grid(height: int, width: int) -> tuple[Any, ...]:
    """Return constants: x, y, indices of the border, the coarse grid and its terms [N, 6]."""
    y, x = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None]
    ring = max(1, min(height, width) // 20)
    border = np.ones((height, width), bool)
    border[ring:-ring, ring:-ring] = False
    coarse = tuple(slice(None, None, max(1, side // FIT_SIDE)) for side in (height, width))
    v, u = np.broadcast_arrays(y[coarse[0]], x[:, coarse[1]])
    surface = np.stack([np.ones_like(u), u, v, u * u, u * v, v * v], axis=-1)
    return x, y, np.flatnonzero(border), coarse, surface.reshape(-1, 6)


def _otsu(ink: NDArray[np.float64]) -> float:
    """Return Otsu's threshold (1979), which maximises the variance between both classes."""
    histogram, edges = np.bincount(ink.astype(np.intp).ravel(), minlength=256), np.arange(257)
    below = np.cumsum(histogram)
    above = ink.size - below
    total = np.cumsum(histogram * edges[:-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (total / below - (total[-1] - total) / above) ** 2
    between[np.isnan(between)] = 0  # a class is empty
    return float(edges[1:][between == between.max()].mean())  # the middle of a plateau


def _crop(ink: NDArray[np.float64], strokes: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Crop to the strokes, leaving out small connected components."""
    (box,) = ndimage.find_objects(strokes.view(np.uint8), 1)
    ink, strokes = ink[box], strokes[box]
    spots, _ = ndimage.label(strokes, EIGHT_NEIGHBOURS)
    large = np.bincount(spots.ravel()) >= SPECK * np.count_nonzero(strokes)
    large[0] = False  # the background
    if large[1:].all() or not large.any():
        return ink
    (box,) = ndimage.find_objects(large[spots].view(np.uint8), 1)
    return ink[box]


def _frame(ink: NDArray[np.float64]) -> Gray:
    """Scale a digit into the box and put its centre of mass into the centre."""
    image = _thicken(_fit(Image.fromarray((ink * 255).round().astype(np.uint8)), BOX * FINE))
    digit = np.asarray(_fit(image, BOX, enlarge=True), dtype=np.float64)
    digit *= 255 / digit.max()
    framed = np.zeros((SIDE, SIDE), np.uint8)
    top, left = (
        min(max(round(CENTRE - centre), 0), SIDE - length)
        for centre, length in zip(ndimage.center_of_mass(digit), digit.shape, strict=True)
    )
    framed[top : top + digit.shape[0], left : left + digit.shape[1]] = digit.round()
    return framed


def _fit(image: Image.Image, side: int, enlarge: bool = False) -> Image.Image:
    scale = side / max(image.size)
    if scale > 1 and not enlarge:
        return image
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def _thicken(image: Image.Image) -> Image.Image:
    """Dilate thin strokes, which would fade when they are scaled to the box."""
    scale = max(image.size) / BOX
    strokes = np.asarray(image) > 127
    area, inner = strokes.sum(), ndimage.binary_erosion(strokes).sum()
    width = 2 * area / max(1, int(area - inner))  # a long stroke has two edges
    grow = int((MIN_STROKE * scale - width) / 2)
    if grow < 1:
        return image
    return ImageOps.expand(image, grow).filter(ImageFilter.MaxFilter(2 * grow + 1))
