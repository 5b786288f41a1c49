"""Find the sheet of paper in a picture, and separate ink from its background."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from app.inference.image_io import Gray

Ink = NDArray[np.float64]  # [H, W], 0 to 255
Mask = NDArray[np.bool_]

COARSE_SIDE = 128  # pixels of the picture in which a sheet is found
MIN_SHEET, MAX_SHEET = 0.1, 0.98  # share of the picture
SOLID = 0.6  # share of a sheet that is not ink, at least
COMPACTNESS = (11.7, 12.1)  # of a sheet, see `_find_sheet`
BRIGHT_BORDER = 0.35  # share of bright pixels at the border from which the background is bright
DIM = 32  # added to the background: suppresses noise in dark areas


class Surface(NamedTuple):
    """The part of a picture that is searched for ink: a sheet, or the whole picture."""

    gray: Gray  # dark ink on light
    inside: Mask  # False beyond the sheet
    is_sheet: bool  # found in the picture; False: the whole picture


def find_surfaces(gray: Gray, invert: bool | None) -> Iterator[Surface]:
    """Yield the sheets that are found in the picture, light ones first, and the whole picture.

    `invert`: the ink is dark. None: dark on a light sheet, light on a dark one, and on the whole
    picture dark if its border is bright.
    """
    factor = -(-max(gray.shape) // COARSE_SIDE)
    coarse = np.asarray(Image.fromarray(gray).reduce(factor))
    bright = coarse > otsu(coarse)
    for dark_ink in (True, False) if invert is None else (invert,):
        sheet = _find_sheet(bright if dark_ink else ~bright)
        if sheet is not None and (dark_ink or not _is_shadow(sheet)):
            inside = sheet.repeat(factor, 0).repeat(factor, 1)[: gray.shape[0], : gray.shape[1]]
            (box,) = ndimage.find_objects(inside.view(np.uint8), 1)
            yield Surface((gray if dark_ink else 255 - gray)[box], inside[box], True)
    if invert is None:
        invert = bool(border(bright.view(np.uint8)).mean() >= BRIGHT_BORDER)
    yield Surface(gray if invert else 255 - gray, np.ones(gray.shape, bool), False)


def _find_sheet(shade: Mask) -> Mask | None:
    """Return the largest region of pixels of one shade, holes filled, if it is compact as a sheet.

    The compactness, area / sqrt(det(covariance)), is 12 for every parallelogram, 4π for every
    ellipse (such as a 0 in chalk), and less for most other shapes.
    """
    regions, count = ndimage.label(shade)
    if not count:
        return None
    largest = 1 + np.bincount(regions.ravel())[1:].argmax()
    sheet = ndimage.binary_fill_holes(regions == largest)
    places = np.nonzero(sheet)
    area = len(places[0])
    if not MIN_SHEET * sheet.size <= area <= MAX_SHEET * sheet.size:
        return None
    if shade[sheet].mean() < SOLID:  # a box in chalk
        return None
    spread = np.sqrt(np.linalg.det(np.cov(places, bias=True)))
    if not COMPACTNESS[0] * spread <= area <= COMPACTNESS[1] * spread:
        return None
    inner = ndimage.binary_erosion(sheet, iterations=2, border_value=1)  # without its edges
    return inner if inner.any() else None


def _is_shadow(region: Mask) -> bool:
    """Return whether a dark region reaches two adjacent sides of the picture, as shadows do."""
    return bool(region[[0, -1]].any() and region[:, [0, -1]].any())


def ink_of(surface: Surface, side: int) -> Ink:
    """Return the contrast of the ink to the background: the closing by a square of `side` pixels.

    It removes dark details narrower than the square and keeps the edges of shadows.
    """
    brightest = ndimage.maximum_filter(surface.gray, side, mode="constant", cval=0)
    background = ndimage.minimum_filter(brightest, side, mode="constant", cval=255)
    ink = np.subtract(background, surface.gray, dtype=np.float64)
    ink *= (255 / (np.arange(256.0) + DIM))[background]
    if surface.is_sheet:
        ink *= surface.inside
    return ink


def border(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the pixels at the border of an image."""
    return np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])


def edge_of(mask: Mask) -> Mask:
    """Return the pixels of a mask with one of four neighbours outside of it."""
    edge = mask.copy()
    edge[1:-1, 1:-1] &= ~(mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:])
    return edge


def otsu(values: NDArray[np.generic]) -> float:
    """Return Otsu's threshold (1979), which maximises the variance between both classes."""
    histogram, edges = np.bincount(values.astype(np.intp).ravel(), minlength=256), np.arange(257)
    below = np.cumsum(histogram)
    above = values.size - below
    total = np.cumsum(histogram * edges[:-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (total / below - (total[-1] - total) / above) ** 2
    between[np.isnan(between)] = 0  # a class is empty
    return float(edges[1:][between == between.max()].mean())  # the middle of a plateau
