import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from app.config.errors import UserError
from app.inference.image_io import find_pictures, read_gray
from app.inference.preprocess import to_digit


def seven(dtype, paper, ink):
    """Return a picture of a 7 in any depth."""
    image = Image.new("L", (120, 160))
    line = [(30, 40), (90, 40), (50, 120)]
    ImageDraw.Draw(image).line(line, fill=255, width=9, joint="curve")
    return np.where(np.asarray(image) > 0, ink, paper).astype(dtype)


def saved(values, path):
    Image.fromarray(values).save(path)
    return read_gray(path)


@pytest.fixture
def expected(tmp_path):
    return to_digit(saved(seven(np.uint8, 230, 40), tmp_path / "8.png"))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
@pytest.mark.parametrize("shade", [30, 1000, 40_000])
def test_even_deep_scan_is_blank(dtype, shade, tmp_path):
    scan = np.full((60, 80), shade, dtype)
    scan[30, 40] -= 1
    assert to_digit(saved(scan, tmp_path / "a.tif")) is None


@pytest.mark.parametrize(
    ("dtype", "paper", "ink"),
    [
        pytest.param(np.uint16, 59_000, 10_000, id="16 bits"),
        pytest.param(np.uint16, 3_700, 640, id="12 bits in 16"),
        pytest.param(np.int32, 230, 40, id="8 bits in 32"),
        pytest.param(np.int32, -900, -1000, id="negative"),
        pytest.param(np.float32, 0.9, 0.15, id="float"),
        pytest.param(np.float32, 3e7, 2e7, id="large float"),
    ],
)
def test_deep_pictures_are_scaled_by_their_range(dtype, paper, ink, expected, tmp_path):
    digit = to_digit(saved(seven(dtype, paper, ink), tmp_path / "a.tif"))
    assert np.abs(digit.astype(int) - expected).mean() < 1


@pytest.mark.parametrize("outlier", [np.inf, -np.inf, np.nan, 1e30, -1e30])
def test_outliers_in_floats_do_not_change_the_digit(outlier, expected, tmp_path):
    values = seven(np.float32, 0.9, 0.15)
    values[5, 7] = outlier
    digit = to_digit(saved(values, tmp_path / "a.tif"))
    assert np.abs(digit.astype(int) - expected).mean() < 1


def test_float_picture_without_numbers_is_blank(tmp_path):
    assert to_digit(saved(np.full((9, 9), np.nan, np.float32), tmp_path / "a.tif")) is None


def test_named_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "7.png")
    for path in (tmp_path / "7.png", Path("/dev/zero")):
        assert find_pictures(str(path)) == [path]
        with pytest.raises(UserError, match=r"^cannot be read \(not a regular file\)$"):
            read_gray(path)


def peak_memory():
    """Return the peak of the resident memory of this process in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.parametrize("kind", ["uint16", "float32", "transparent", "mostly transparent"])
def test_large_pictures_take_few_bytes_per_pixel(kind, tmp_path):
    side = 3000
    gray = np.zeros((side, side), np.uint8)
    gray[500:2500, 1300:1700] = 200
    if kind in ("uint16", "float32"):
        Image.fromarray(gray.astype(kind) * 256).save(tmp_path / "1.tiff")
    else:
        alpha = np.full_like(gray, 255) if kind == "transparent" else gray
        Image.fromarray(np.dstack([gray, gray, gray, alpha])).save(tmp_path / "1.tiff")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_memory()
    read = read_gray(tmp_path / "1.tiff")
    assert peak_memory() - before < 2**25 + 16 * side**2
    assert np.ptp(read) > 100


def test_lack_of_memory_is_named(monkeypatch, tmp_path):
    Image.new("L", (20, 20)).save(tmp_path / "1.png")

    def fail(*arguments):
        raise MemoryError("Unable to allocate 1.26 GiB for an array")

    monkeypatch.setattr(np, "asarray", fail)
    with pytest.raises(UserError, match=r"^out of memory$"):
        read_gray(tmp_path / "1.png")


def test_heic_without_plug_in_names_it(tmp_path):
    (tmp_path / "b.HEIC").write_bytes(b"no picture")
    (path,) = find_pictures(str(tmp_path))
    with pytest.raises(UserError, match=r"^not a picture, .*pip install pillow-heif\)$"):
        read_gray(path)


def test_heic_is_read_with_plug_in(expected, tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(Image.fromarray(seven(np.uint8, 230, 40))).save(tmp_path / "a.heic")
    (path,) = find_pictures(str(tmp_path / "*.heic"))
    assert np.abs(to_digit(read_gray(path)).astype(int) - expected).mean() < 3
