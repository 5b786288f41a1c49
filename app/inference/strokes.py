"""Find the digit in the ink: discard strokes cut by the border, frames, lines, blots, specks."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from app.inference.paper import Ink, Mask, Surface, edge_of, ink_of, otsu

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

MIN_CONTRAST = 20  # of 255, between ink and background; below: blank
WIDEST_STROKE = 0.35  # of the longer side of the picture
MIN_CLOSING = 7  # side in pixels
SHADOW = 0.9  # a removed region is a shadow if its ink is at most this share of the strokes' ink
MIN_ELONGATION = 2.3  # length of a stroke in its widths; a shorter part is a dot or a blot
MIN_LENGTH = 1 / 16  # of the longer side of the picture, if there are longer strokes
MAX_FRAMES = 64  # candidates, the longest parts
ENCLOSED = 0.45  # minimum length of a digit in a frame, as a share of the frame's shorter side
STRAIGHT = 1.15  # maximum length of a line, in diagonals of its box
FLAT = 1.5  # minimum width of a horizontal line, in heights
MIN_LINE = 4  # minimum length of a line, in stroke widths
UNDERLINE = 1.2  # minimum width of a line below the digit, in widths of the digit's main part
ELONGATED = 2.8  # widths; a shorter part is a blot beside the digit
NEAR = 0.15  # of the length of the digit; its other parts are no farther away
SPECK = 0.02  # share of the largest part of the digit; smaller parts are dropped
EIGHT_NEIGHBOURS = np.ones((3, 3), bool)


class Parts(NamedTuple):
    """Connected components of the ink: arrays [N], and [N, 2] with rows and columns."""

    area: Floats
    edge: Floats  # pixels at the edge
    is_cut: Bools  # at the edge of the sheet or the picture
    start: Floats  # of the bounding box, [N, 2]
    stop: Floats  # [N, 2]

    @property
    def size(self) -> Floats:
        """Height and width, [N, 2]."""
        return self.stop - self.start

    @property
    def length(self) -> Floats:
        """The longer of height and width."""
        return self.size.max(1)

    @property
    def pen(self) -> Floats:
        """Stroke width: a long stroke has two edges."""
        return 2 * self.area / self.edge


class Digit(NamedTuple):
    """The strokes of a digit in a picture."""

    ink: Ink
    threshold: float
    strokes: Mask
    is_cut: bool  # at the edge of the sheet or the picture

    @property
    def contrast(self) -> float:
        """Mean of the strokes' ink, 0 to 255."""
        return float(self.ink[self.strokes].mean())


def find_digit(surface: Surface) -> Digit | None:
    """Return the digit on a surface; None: there is none."""
    side = max(MIN_CLOSING, round(WIDEST_STROKE * max(surface.gray.shape)))
    ink = ink_of(surface, side | 1)
    found = _strokes_above(otsu(ink), ink, surface)
    if found is not None and found.is_cut:
        # a band of shadow across the picture: the ink in it is darker
        darker = _strokes_above(otsu(ink[found.strokes]), ink, surface)
        if darker is not None and not darker.is_cut and not _loses_ink(found, darker):
            return darker
    return found


def _loses_ink(digit: Digit, part: Digit) -> bool:
    """Return whether ink of `digit` that `part` lacks is as dark as the ink of both: no shadow."""
    lost = digit.strokes & ~part.strokes
    kept = digit.strokes & part.strokes
    if not lost.any() or not kept.any():
        return bool(lost.any())
    return bool(digit.ink[lost].mean() > SHADOW * digit.ink[kept].mean())


def _strokes_above(threshold: float, ink: Ink, surface: Surface) -> Digit | None:
    strokes = ink >= threshold
    line, rest = ink[strokes], ink[~strokes]
    if not line.size or line.mean() - (rest.mean() if rest.size else 0) < MIN_CONTRAST:
        return None
    labels, count = ndimage.label(strokes, EIGHT_NEIGHBOURS)
    parts = _measure(labels, count, strokes, surface.inside)
    main = _choose(parts, surface)
    if main is None:
        return None
    kept = np.concatenate([[False], _belongs(parts, main)])[labels]
    return Digit(ink, threshold, kept, bool(parts.is_cut[main]))


def _measure(labels: NDArray[Any], count: int, strokes: Mask, inside: Mask) -> Parts:
    def pixels(mask: Mask) -> Floats:
        return np.bincount(labels[mask], minlength=count + 1)[1:].astype(np.float64)

    boxes = ndimage.find_objects(labels)
    start, stop = (
        np.array([[getattr(side, end) for side in box] for box in boxes], np.float64)
        for end in ("start", "stop")
    )
    is_cut = pixels(edge_of(inside)) > 0
    return Parts(pixels(strokes), pixels(edge_of(strokes)), is_cut, start, stop)


def _choose(parts: Parts, surface: Surface) -> int | None:
    """Return the part with the longest stroke; apply each rule only if it leaves a candidate."""
    possible = parts.length >= MIN_ELONGATION * parts.pen
    if surface.is_sheet:
        possible &= ~parts.is_cut
    if not possible.any():
        return None
    is_long = parts.length >= MIN_LENGTH * max(surface.gray.shape)
    for rule in (is_long, ~parts.is_cut, ~_is_frame(parts, possible), ~_is_line(parts)):
        if (possible & rule).any():
            possible &= rule
    return int(np.where(possible, parts.edge, 0).argmax())


def _is_frame(parts: Parts, strokes: Bools) -> Bools:
    """Return which parts are frames: their box contains a stroke as long as a digit."""
    is_frame, length = np.zeros(len(parts.area), bool), parts.length
    for index in np.argsort(-length)[:MAX_FRAMES]:
        is_inside = (parts.start > parts.start[index]) & (parts.stop < parts.stop[index])
        is_long = length >= ENCLOSED * parts.size[index].min()
        is_frame[index] = (strokes & is_inside.all(1) & is_long).any()
    return is_frame


def _is_line(parts: Parts) -> Bools:
    """Return which parts are straight and flat."""
    height, width = parts.size.T
    is_straight = parts.edge / 2 <= STRAIGHT * np.hypot(height, width)
    return is_straight & (width >= FLAT * height) & (parts.length > MIN_LINE * parts.pen)


def _belongs(parts: Parts, main: int) -> Bools:
    """Return which parts belong to the digit with the main part `main`."""
    gap = np.where(parts.length >= ELONGATED * parts.pen, NEAR * parts.length[main], 0)[:, None]
    is_near = (parts.start <= parts.stop[main] + gap) & (parts.stop >= parts.start[main] - gap)
    is_below = (parts.start + parts.stop)[:, 0] / 2 >= parts.stop[main, 0]
    is_underline = _is_line(parts) & is_below & (parts.size[:, 1] > UNDERLINE * parts.size[main, 1])
    kept = is_near.all(1) & ~is_underline
    kept &= parts.area >= SPECK * parts.area[main]
    kept &= ~parts.is_cut | parts.is_cut[main]
    kept &= ~_is_frame(parts, np.ones(len(parts.area), bool))
    kept[main] = True
    return kept
