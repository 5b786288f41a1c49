"""Read pictures from files and standard input as grayscale."""

import glob
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from app.config.errors import UserError

with suppress(ImportError):  # optional, for HEIC
    import pillow_heif

    pillow_heif.register_heif_opener()

Gray = NDArray[np.uint8]  # [H, W], 0 is black
STANDARD_INPUT = "-"
MAX_PIXELS = 178_956_970  # of a picture, as in Pillow
HEIF = (".heic", ".heif")  # suffixes
FULL_SCALES = (1.0, 2.0**8 - 1, 2.0**10 - 1, 2.0**12 - 1, 2.0**14 - 1, 2.0**16 - 1)  # white
OUTLIERS = 1e-4  # share of the pixels at each end, hot or dead, and at least one


def list_pictures(input: str) -> Iterator[tuple[str, Path | BinaryIO]]:
    """Yield (name, file) of each picture of a file, a folder, a glob pattern or `-`.

    Standard input has a picture, or names, one per line.
    """
    names = [input]
    if input == STANDARD_INPUT:
        content = sys.stdin.buffer.read() if sys.stdin else b""  # None: closed
        names = [os.fsdecode(name) for name in content.splitlines() if name.strip()]
        if not any(map(os.path.exists, names)):
            yield input, io.BytesIO(content)
            return
    for name in names:
        paths = find_pictures(name)
        for path in paths:
            yield (name if paths == [Path(name)] else str(path)), path


def find_pictures(pattern: str) -> list[Path]:
    """List the picture files that a file name, a folder or a glob pattern names.

    In a folder or a pattern keep known suffixes, dangling links included. Without any or after an
    error, return the name itself, which `read_gray` refuses.
    """
    path = Path(pattern)
    try:
        if path.is_file():
            return [path]
        names = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute)
        candidates = path.iterdir() if path.is_dir() else map(Path, names)
        known = {*Image.registered_extensions(), *HEIF}
        pictures = sorted(
            file
            for file in candidates
            if file.suffix.lower() in known and (file.is_file() or not file.exists())
        )
    except OSError:  # the name is too long or the folder unreadable
        return [path]
    return pictures or [path]


def read_gray(file: Path | BinaryIO) -> Gray:
    """Read the first frame of a picture of any mode and depth as grayscale.

    Transparent pixels become background: the median of the opaque pixels or, if most pixels are
    transparent, black under a bright drawing and white under a dark one. Raise a UserError if the
    file is no picture or has more than `MAX_PIXELS`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(file, Path) and (file.is_fifo() or file.is_char_device()):
                raise OSError("not a regular file")  # it may have no end
            with Image.open(file) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                image = ImageOps.exif_transpose(opened)
                if image.mode.startswith(("I", "F")):  # Pillow would clip these at 255
                    return _to_8_bits(np.asarray(image, dtype=np.float64), image.mode == "F")
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
        raise UserError(f"too large, at most {MAX_PIXELS:,} pixels") from error
    except UnidentifiedImageError as error:
        hint = " (HEIC needs pip install pillow-heif)" if str(file).lower().endswith(HEIF) else ""
        raise UserError(f"not a picture, or of an unknown format{hint}") from error
    except Exception as error:  # Pillow raises many types for damaged files
        raise UserError(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not alpha.any():
        return np.zeros(alpha.shape, np.uint8)
    if alpha.mean() > 0.5:
        background = float(np.median(gray[alpha > 0.5]))
    else:
        background = 255.0 if np.average(gray, weights=alpha) < 128 else 0.0
    return (gray * alpha + background * (1 - alpha)).round().astype(np.uint8)


def _to_8_bits(values: NDArray[np.float64], is_float: bool) -> Gray:
    """Scale by the least full scale that holds the finite values without outliers."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.zeros(values.shape, np.uint8)
    outliers = min(1 + int(OUTLIERS * finite.size), (finite.size - 1) // 2)
    ends = (outliers, finite.size - 1 - outliers)
    low, high = np.partition(finite, ends)[list(ends)]
    scales = [scale for scale in FULL_SCALES if high <= scale and (is_float or scale > 1)]
    black, white = (0.0, scales[0]) if low >= 0 and scales else (low, max(high, low + 1e-9))
    shades = np.nan_to_num(values, nan=black, posinf=white, neginf=black)
    return (np.clip((shades - black) / (white - black), 0, 1) * 255).round().astype(np.uint8)
