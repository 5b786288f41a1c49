"""Read pictures from files and standard input as grayscale."""

import glob
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from app.config.errors import UserError, is_out_of_memory

with suppress(ImportError):  # optional, for HEIC
    import pillow_heif

    pillow_heif.register_heif_opener()

Gray = NDArray[np.uint8]  # [H, W], 0 is black
STANDARD_INPUT = "-"
# Content of a picture, not names: binary, or a text format (PBM, PGM, PPM, XBM, XPM, SVG).
PICTURE = re.compile(rb"[\0-\x08\x0e-\x1f]|\A(P[1-3]\s|#define\s|/\* XPM|\s*<)")
MAX_PIXELS = 178_956_970  # of a picture, as in Pillow
HEIF = (".heic", ".heif")  # suffixes
FULL_SCALES = (1.0, 2.0**8 - 1, 2.0**10 - 1, 2.0**12 - 1, 2.0**14 - 1, 2.0**16 - 1)  # white
PART = 2**20  # pixels
OUTLIERS = 1e-4  # share of the pixels at each end, hot or dead, and at least one


def list_pictures(input: str) -> Iterator[tuple[str, Path | BinaryIO]]:
    """Yield (name, file) of each picture of a file, a folder, a glob pattern or `-`.

    Standard input has a picture, or names, one per line.
    """
    names = [input]
    if input == STANDARD_INPUT:
        content = sys.stdin.buffer.read() if sys.stdin else b""  # None: closed
        names = [os.fsdecode(name) for name in content.splitlines() if name.strip()]
        if not names:
            raise UserError(f"input={input}: standard input is empty")
        if not any(map(os.path.exists, names)) and PICTURE.search(content):
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
                ImageOps.exif_transpose(opened, in_place=True)
                if opened.mode.startswith(("I", "F")):  # Pillow would clip these at 255
                    return _to_8_bits(np.asarray(opened))
                if not opened.has_transparency_data:
                    return np.asarray(opened.convert("L"))
                image = opened.convert("RGBA")
                return _on_background(
                    np.asarray(image.convert("L")), np.asarray(image.getchannel("A"))
                )
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
        if is_out_of_memory(error):
            raise UserError("out of memory") from error
        raise UserError(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _on_background(gray: Gray, alpha: Gray) -> Gray:
    """Blend with the background that `read_gray` describes."""
    if not alpha.any():
        return np.zeros(alpha.shape, np.uint8)
    if alpha.mean() > 127.5:
        background = float(np.median(gray[alpha > 127]))
    else:
        total = np.einsum("ij,ij", gray, alpha, dtype=np.int64)
        background = 255.0 if total < 128 * alpha.sum(dtype=np.int64) else 0.0

    def blend(gray: Gray, alpha: Gray) -> NDArray[np.float64]:
        share = alpha / 255.0
        return gray * share + background * (1 - share)

    return _in_parts(blend, gray, alpha)


def _to_8_bits(values: NDArray[Any]) -> Gray:
    """Scale by the least full scale that holds the finite values without outliers."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.zeros(values.shape, np.uint8)
    outliers = min(1 + int(OUTLIERS * finite.size), (finite.size - 1) // 2)
    ends = [outliers, finite.size - 1 - outliers]
    finite.partition(ends)
    low, high = map(float, finite[ends])
    is_float = values.dtype.kind == "f"
    scales = [scale for scale in FULL_SCALES if high <= scale and (is_float or scale > 1)]
    black, white = (0.0, scales[0]) if low >= 0 and scales else (low, max(high, low + 1e-9))

    def shade(values: NDArray[Any]) -> NDArray[np.float64]:
        shades = np.nan_to_num(values.astype(np.float64), nan=black, posinf=white, neginf=black)
        return np.clip((shades - black) / (white - black), 0, 1) * 255

    return _in_parts(shade, values)


def _in_parts(function: Callable[..., NDArray[np.float64]], *arrays: NDArray[Any]) -> Gray:
    """Apply an elementwise function to parts of arrays: whole, float64 would fill the memory."""
    result = np.empty(arrays[0].shape, np.uint8)
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, result.size, PART):
        part = slice(start, start + PART)
        result.reshape(-1)[part] = function(*(array[part] for array in flat)).round()
    return result
