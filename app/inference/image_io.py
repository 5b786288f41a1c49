"""Read pictures from files and standard input as grayscale."""

import glob
import io
import re
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
MAX_PIXELS = 178_956_970  # of a picture, as in Pillow


def list_pictures(input: str) -> Iterator[tuple[str, Path | BinaryIO]]:
    """Yield (name, file) of each picture that `input` names, for `read_gray`.

    `input` is a file, a folder, a glob pattern, or `-`: standard input with a picture, or a name
    per line.
    """
    names = [input]
    if input == STANDARD_INPUT:
        content = sys.stdin.buffer.read() if sys.stdin else b""  # None: closed
        text = content.decode(errors="ignore")
        if text.encode() != content or "\0" in text:
            yield input, io.BytesIO(content)
            return
        names = [line for line in text.splitlines() if line.strip()]
        if not names:
            raise UserError("input=-: standard input is empty")
    for name in names:
        for path in find_pictures(name):
            yield str(path), path


def find_pictures(pattern: str) -> list[Path]:
    """List the picture files that a file name, a folder or a glob pattern names.

    In a folder (without sub-folders) or a pattern, keep the files with a suffix that Pillow knows,
    dangling links included. Without any or after an error, return the name itself, which
    `read_gray` refuses.
    """
    path = Path(pattern)
    try:
        if path.is_file():
            return [path]
        names = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute)
        candidates = path.iterdir() if path.is_dir() else map(Path, names)
        known = Image.registered_extensions()
        pictures = sorted(
            file
            for file in candidates
            if file.suffix.lower() in known and (file.is_file() or not file.exists())
        )
    except OSError:  # the name is too long or the folder unreadable
        return [path]
    return pictures or [path]


def read_gray(
    file: Path | BinaryIO, most: int = MAX_PIXELS, formats: list[str] | None = None
) -> Gray:
    """Read the first frame of a picture of any mode and depth as grayscale.

    Transparent pixels become background: the median of the opaque pixels or, if most pixels are
    transparent, black under a bright drawing and white under a dark one. Raise a UserError with the
    reason if Pillow cannot read the file as one of `formats` (None: any), or if it has more than
    `most` pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file, formats=formats) as opened:
                if opened.width * opened.height > most:
                    raise Image.DecompressionBombError
                image = ImageOps.exif_transpose(opened)
                if image.mode.startswith(("I", "F")):  # Pillow would clip these at 255
                    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
                    values -= values.min()
                    return (values * (255 / max(values.max(), 1e-9))).round().astype(np.uint8)
                if not image.has_transparency_data:
                    return np.asarray(image.convert("L"))
                gray = np.asarray(image.convert("RGBA").convert("L"), dtype=np.float64)
                alpha = np.asarray(image.convert("RGBA").getchannel("A")) / 255.0
    except FileNotFoundError as error:
        is_address = re.match("[a-z]{2,}:/", str(file))  # a Path has one slash
        hint = ", addresses are not downloaded" if is_address else ""
        raise UserError(f"no such picture{hint}") from error
    except IsADirectoryError as error:
        raise UserError("no picture in this folder") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"too large, at most {most:,} pixels") from error
    except UnidentifiedImageError as error:
        raise UserError("not a picture, or of an unknown format") from error
    except Exception as error:  # Pillow raises many types for damaged files
        raise UserError(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not alpha.any():
        return np.zeros(alpha.shape, np.uint8)
    if alpha.mean() > 0.5:
        background = float(np.median(gray[alpha > 0.5]))
    else:
        background = 255.0 if np.average(gray, weights=alpha) < 128 else 0.0
    return (gray * alpha + background * (1 - alpha)).round().astype(np.uint8)
