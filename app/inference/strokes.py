"""Find the digit among the ink: leave out what is cut off, frames, lines, blots and specks."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from app.inference.paper import Ink, Mask, Surface, edge_of, ink_of, otsu

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

MIN_CONTRAST = 20  # of 255, between ink and paper; below: blank
WIDEST_STROKE = 0.35  # of the longer side of the picture
MIN_CLOSING = 7  # pixels
SHADOW = 0.9  # of the ink of strokes, at most
CLOSING = 2  # widths of the strokes
MIN_STROKE = 2.3  # widths; what is shorter is a dot or a blot
WIDER = 2  # a sheet between its strokes, in their widths; else it is an 8 in chalk
MIN_LENGTH = 1 / 16  # of the longer side of the picture, if there are longer strokes
ENCLOSED = 0.45  # of the shorter side of a frame, the least length of the digit in it
STRAIGHT = 1.15  # length of a line along its pen stroke, in distances between its ends
FLAT = 1.5  # width of a line in heights
MAX_FRAMES = 64  # candidates, the longest parts
ELONGATED = 2.8  # widths; a shorter part is a blot beside the digit
NEAR = 0.15  # of the length of the digit; its other parts are no farther away
SPECK = 0.02  # share of the ink; smaller parts are dropped
EIGHT_NEIGHBOURS = np.ones((3, 3), bool)


class Parts(NamedTuple):
    """Connected components of the ink, arrays [N]; their boxes are half-open."""

    area: Floats
    edge: Floats  # pixels at the edge
    pen: Floats  # stroke width: a long stroke has two edges
    top: Floats
    left: Floats
    bottom: Floats
    right: Floats
    height: Floats
    width: Floats
    length: Floats  # the longer of both
    is_cut: Bools  # at the edge of the sheet or the picture


class Digit(NamedTuple):
    """The strokes of a digit in a picture."""

    ink: Ink
    threshold: float
    strokes: Mask
    others: Mask  # ink that does not belong to it
    pen: float  # stroke width in pixels


def find_digit(surface: Surface) -> Digit | None:
    """Return the digit on a surface; None: there is none.

    The closing that finds the paper must be wider than a stroke, which is measured by closings that
    become narrower: the narrowest keeps the most of shadows off the digit.
    """
    side = max(MIN_CLOSING, round(WIDEST_STROKE * max(surface.gray.shape)))
    found = _find_strokes(surface, side)
    while found is not None:
        narrower = max(MIN_CLOSING, round(CLOSING * found.pen))
        if narrower >= 0.7 * side:
            break
        side, finer = narrower, _find_strokes(surface, narrower)
        if finer is None or _loses_ink(found, finer):
            break
        found = finer
    return found


def _loses_ink(wide: Digit, narrow: Digit) -> bool:
    """Return whether what only `wide` has is as dark as its strokes: no shadow."""
    lost = wide.strokes & ~narrow.strokes
    kept = wide.strokes & narrow.strokes
    if not lost.any() or not kept.any():
        return bool(lost.any())
    return bool(wide.ink[lost].mean() > SHADOW * wide.ink[kept].mean())


def _find_strokes(surface: Surface, side: int) -> Digit | None:
    ink = ink_of(surface, side | 1)
    threshold = otsu(ink)
    strokes = ink >= threshold
    line, paper = ink[strokes], ink[~strokes]
    if not line.size or line.mean() - (paper.mean() if paper.size else 0) < MIN_CONTRAST:
        return None
    labels, count = ndimage.label(strokes, EIGHT_NEIGHBOURS)
    parts = _measure(labels, count, strokes, surface.inside)
    main = _choose(parts, surface)
    if main is None:
        return None
    kept = np.concatenate([[False], _belongs(parts, main)])[labels]
    return Digit(ink, threshold, kept, strokes & ~kept, float(parts.pen[main]))


def _measure(labels: NDArray[Any], count: int, strokes: Mask, inside: Mask) -> Parts:
    def pixels(mask: Mask) -> Floats:
        return np.bincount(labels[mask], minlength=count + 1)[1:].astype(np.float64)

    area, edge = pixels(strokes), pixels(edge_of(strokes))
    rows, columns = zip(*ndimage.find_objects(labels), strict=True)
    top, bottom, left, right = (
        np.array([getattr(side, end) for side in sides], np.float64)
        for sides in (rows, columns)
        for end in ("start", "stop")
    )
    height, width = bottom - top, right - left
    return Parts(
        area=area,
        edge=edge,
        pen=2 * area / edge,
        top=top,
        left=left,
        bottom=bottom,
        right=right,
        height=height,
        width=width,
        length=np.maximum(height, width),
        is_cut=pixels(edge_of(inside)) > 0,
    )


def _choose(parts: Parts, surface: Surface) -> int | None:
    """Return the index of the part with the longest stroke that is likely a digit.

    Each rule holds only if something is left.
    """
    possible = parts.length >= MIN_STROKE * parts.pen
    if surface.is_sheet:
        possible &= ~parts.is_cut & (WIDER * parts.pen <= _paper_width(parts, surface))
    if not possible.any():
        return None
    is_long = parts.length >= MIN_LENGTH * max(surface.gray.shape)
    for rule in (is_long, ~parts.is_cut, ~_is_frame(parts, possible), ~_is_line(parts)):
        if (possible & rule).any():
            possible &= rule
    return int(np.where(possible, parts.edge, 0).argmax())


def _paper_width(parts: Parts, surface: Surface) -> float:
    """Return the width of the paper between strokes and edges of a sheet, as that of strokes."""
    inside = surface.inside
    edge = np.count_nonzero(edge_of(inside)) + parts.edge.sum()
    return float(2 * (np.count_nonzero(inside) - parts.area.sum()) / edge)


def _is_frame(parts: Parts, strokes: Bools) -> Bools:
    """Return which strokes have another one in their box, as long as a digit in a frame."""
    is_frame = np.zeros(len(parts.area), bool)
    for index in np.argsort(-parts.length)[:MAX_FRAMES]:
        is_inside = (parts.top > parts.top[index]) & (parts.bottom < parts.bottom[index])
        is_inside &= (parts.left > parts.left[index]) & (parts.right < parts.right[index])
        is_long = parts.length >= ENCLOSED * min(parts.height[index], parts.width[index])
        is_frame[index] = (strokes & is_inside & is_long).any()
    return is_frame


def _is_line(parts: Parts) -> Bools:
    """Return which parts are straight and flat."""
    is_straight = parts.edge / 2 <= STRAIGHT * np.hypot(parts.height, parts.width)
    return is_straight & (parts.width >= FLAT * parts.height) & (parts.length > 4 * parts.pen)


def _belongs(parts: Parts, main: int) -> Bools:
    """Return which parts belong to the digit whose largest part is `main`."""
    gap = np.where(parts.length >= ELONGATED * parts.pen, NEAR * parts.length[main], 0)
    kept = (parts.top <= parts.bottom[main] + gap) & (parts.bottom >= parts.top[main] - gap)
    kept &= (parts.left <= parts.right[main] + gap) & (parts.right >= parts.left[main] - gap)
    is_below = (parts.top + parts.bottom) / 2 >= parts.bottom[main]
    kept &= ~(_is_line(parts) & is_below & (parts.width > 1.2 * parts.width[main]))
    kept &= parts.area >= SPECK * parts.area[main]
    kept &= ~parts.is_cut | parts.is_cut[main]
    kept &= ~_is_frame(parts, np.ones(len(parts.area), bool))
    kept[main] = True
    return kept
