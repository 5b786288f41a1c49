"""Preprocessing of pictures: find the digit, crop, scale and centre it as in MNIST.

MNIST's images were made by scaling each digit into a 20×20 box, keeping its proportions, and
putting its centre of mass into the centre of 28×28 (LeCun, Cortes & Burges, THE MNIST DATABASE).
"""

import numpy as np
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from app.inference.image_io import Gray
from app.inference.paper import Ink, Surface, border, find_surfaces
from app.inference.strokes import EIGHT_NEIGHBOURS, MIN_CONTRAST, Digit, find_digit

SIDE = 28  # pixels of an MNIST image
BOX = 20  # pixels of the longer side of a digit in it
CENTRE = 14  # pixel index of a digit's centre of mass in it
WORKING_SIDE = 512  # pixels; larger pictures are reduced
FAINT = 130  # of 255, contrast of a digit; below, it is compared with the opposite shade
STRONGER = 1.4  # minimum contrast of a digit in the opposite shade, in contrasts of the faint one
DIGITS = ("mnist", "qmnist", "digits")  # data sets of digits


def frame(picture: Gray, dataset: str, invert: bool | None = None) -> Tensor | None:
    """Frame a picture [H, W] as the images of a data set: uint8 [1, 28, 28], bright on black.

    `invert`: the ink is dark; None: detect. Return None for a blank picture.
    """
    image = (to_digit if dataset in DIGITS else to_thumbnail)(picture, invert)
    return None if image is None else torch.from_numpy(image).unsqueeze(0)


def bright_on_black(picture: Gray, invert: bool | None) -> Tensor | None:
    """Return a picture as uint8 [1, H, W], inverted if dark on light; None if it is blank."""
    if np.ptp(picture) < MIN_CONTRAST:
        return None
    return torch.tensor(255 - picture if _is_inverted(picture, invert) else picture).unsqueeze(0)


def to_thumbnail(gray: Gray, invert: bool | None) -> Gray | None:
    """Reduce a whole picture to [28, 28], bright on black.

    As Fashion-MNIST's images were made (Xiao, Rasul & Vollgraf, arXiv 1708.07747, section 2).
    """
    background = np.median(border(gray))
    small = np.asarray(_fit(Image.fromarray(gray), SIDE), dtype=np.float64)
    if np.ptp(small) < MIN_CONTRAST:
        return None
    framed = np.full((SIDE, SIDE), background)
    top, left = ((SIDE - length) // 2 for length in small.shape)
    framed[top : top + small.shape[0], left : left + small.shape[1]] = small
    return (255 - framed if _is_inverted(gray, invert) else framed).round().astype(np.uint8)


def to_digit(gray: Gray, invert: bool | None = None) -> Gray | None:
    """Find the digit in a picture; crop, scale and centre it as in MNIST: [28, 28]."""
    factor = -(-max(gray.shape) // WORKING_SIDE)
    reduced = gray if factor == 1 else np.asarray(Image.fromarray(gray).reduce(factor))
    for surface in find_surfaces(reduced, invert):
        digit = find_digit(surface)
        if digit is not None:
            if not surface.is_sheet:
                digit = _check_shade(digit, surface, invert)
            return None if digit is None else _frame(_crop(digit))
    return None


def _check_shade(digit: Digit, surface: Surface, invert: bool | None) -> Digit | None:
    """Return the strokes of the opposite shade if `digit` is more likely an area beside a shadow.

    Return None if `digit` is the gap between them: `invert` is wrong.
    """
    is_doubtful = digit.is_cut or digit.contrast < FAINT
    opposite = None
    if invert is not None or is_doubtful:
        opposite = find_digit(surface._replace(gray=255 - surface.gray))
    if opposite is None:
        return digit
    if invert is not None:
        return None if _is_between(digit, opposite) else digit
    is_stronger = digit.is_cut or opposite.contrast > STRONGER * digit.contrast
    is_digit = is_stronger and not opposite.is_cut and not _is_between(opposite, digit)
    return opposite if is_digit else digit


def _is_between(digit: Digit, opposite: Digit) -> bool:
    """Return whether `digit` lies between the strokes of `opposite`."""
    ((rows, columns),) = ndimage.find_objects(opposite.strokes.view(np.uint8), 1)
    outside = digit.strokes.copy()
    outside[rows, columns] = False
    return not outside.any()


def _is_inverted(gray: Gray, invert: bool | None) -> bool:
    return bool(np.median(border(gray)) > 127) if invert is None else invert


def _crop(digit: Digit) -> Ink:
    """Crop to the strokes of a digit and scale their ink to 0 to 1."""
    (box,) = ndimage.find_objects(digit.strokes.view(np.uint8), 1)
    ink, strokes = digit.ink[box], digit.strokes[box]
    noise = np.percentile(digit.ink[digit.ink < digit.threshold], 90)
    full = np.percentile(ink[strokes], 90)
    ink = np.where(ndimage.binary_dilation(strokes, EIGHT_NEIGHBOURS, 3), ink, noise)  # other ink
    return np.clip((ink - noise) / (full - noise), 0, 1)


def _frame(ink: Ink) -> Gray:
    """Scale a digit into the box and put its centre of mass into the centre."""
    image = Image.fromarray((ink * 255).round().astype(np.uint8))
    digit = np.asarray(_fit(image, BOX), dtype=np.float64)
    digit *= 255 / digit.max()
    framed = np.zeros((SIDE, SIDE), np.uint8)
    top, left = (
        min(max(round(CENTRE - centre), 0), SIDE - length)
        for centre, length in zip(ndimage.center_of_mass(digit), digit.shape, strict=True)
    )
    framed[top : top + digit.shape[0], left : left + digit.shape[1]] = digit.round()
    return framed


def _fit(image: Image.Image, side: int) -> Image.Image:
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)
