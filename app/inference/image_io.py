"""Pictures from files and from standard input, as shades of gray."""

import glob
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from app.config.errors import UserError

Gray = NDArray[np.uint8]  # [H, W], 0 is black
STANDARD_INPUT = "-"
_PNG = b"\x89PNG\r\n\x1a\n"  # how every PNG file begins


def read_pictures(input: str) -> Iterator[tuple[str, Gray]]:
    """Read the pictures that `input` names, one after the other: (name, shades of gray).

    Args:
        input: A file, a folder, a pattern; or `-` for standard input, which holds either names of
            these, one a line, or pictures: one of any format, or PNG ones one after the other.

    Raises:
        UserError: There are none, or one of them cannot be read.
    """
    if input != STANDARD_INPUT:
        for path in find_images(input):
            yield str(path), read_gray(path)
        return
    if sys.stdin is None:
        raise UserError("input=-: standard input is closed")
    content = sys.stdin.buffer.read()
    lines = _lines(content)
    if lines is None:
        parts = [_PNG + part for part in content.split(_PNG)[1:]] or [content]
        for number, part in enumerate(parts, 1):
            name = STANDARD_INPUT if len(parts) == 1 else f"{STANDARD_INPUT}#{number}"
            yield name, read_gray(io.BytesIO(part), name)
        return
    if not lines:
        raise UserError("input=-: standard input is empty")
    for line in lines:
        for path in find_images(line):
            yield str(path), read_gray(path)


def _lines(content: bytes) -> list[str] | None:
    """The lines that are not blank; None if this is no text."""
    if b"\0" in content:
        return None
    try:
        return [line for line in content.decode().splitlines() if line.strip()]
    except UnicodeDecodeError:
        return None


def find_images(pattern: str) -> list[Path]:
    """List the pictures that a file name, a folder or a glob pattern stands for.

    Of a folder (not its sub-folders) and of a pattern, files count whose suffix Pillow knows.

    Raises:
        UserError: There is no such file, or no picture among them.
    """
    path = Path(pattern)
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            candidates, nothing = list(path.iterdir()), "no picture in this folder"
        else:
            names = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute)
            candidates = [Path(name) for name in names]
            plain = not glob.has_magic(pattern)
            nothing = "no such file or folder" if plain else "no picture matches"
            if path.exists():
                nothing = "not a file or folder"
        known = Image.registered_extensions()
        pictures = sorted(
            file for file in candidates if file.suffix.lower() in known and file.is_file()
        )
    except OSError as error:
        raise UserError(f"input={pattern}: {error.strerror}") from error
    if not pictures:
        raise UserError(f"input={pattern}: {nothing}")
    return pictures


def read_gray(file: Path | BinaryIO, name: str | None = None) -> Gray:
    """Read a picture of any format, mode and depth as shades of gray; the first frame of several.

    Transparent parts become background: the middle shade of the rest or, where most of the picture
    is transparent and what is left is the drawing itself, the opposite of its shade.

    Args:
        file: The picture.
        name: What to call it in an error; None: its path.

    Raises:
        UserError: Pillow cannot read the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file) as opened:
                image = ImageOps.exif_transpose(opened)
                if image.mode.startswith(("I", "F")):  # Pillow would clip these at 255
                    return _stretch(np.asarray(image, dtype=np.float64))
                if not image.has_transparency_data:
                    return np.asarray(image.convert("L"))
                gray = np.asarray(image.convert("RGBA").convert("L"), dtype=np.float64)
                alpha = np.asarray(image.convert("RGBA").getchannel("A")) / 255.0
    except UnidentifiedImageError as error:
        raise UserError(
            f"input={name or file}: not a picture, or of a format unknown here"
        ) from error
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise UserError(f"input={name or file}: cannot be read ({error})") from error
    if not alpha.any():
        return np.zeros(alpha.shape, np.uint8)
    if alpha.mean() > 0.5:
        background = float(np.median(gray[alpha > 0.5]))
    else:
        background = 255.0 if np.average(gray, weights=alpha) < 128 else 0.0
    return (gray * alpha + background * (1 - alpha)).round().astype(np.uint8)


def _stretch(values: NDArray[np.float64]) -> Gray:
    values = np.nan_to_num(values)
    low, high = values.min(), values.max()
    return ((values - low) * (255 / max(high - low, 1e-9))).round().astype(np.uint8)
