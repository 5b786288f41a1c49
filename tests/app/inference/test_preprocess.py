import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image, ImageDraw, ImageFont

from app.config.errors import UserError
from app.inference.image_io import find_pictures, list_pictures, read_gray
from app.inference.preprocess import BOX, CENTRE, SIDE, frame, to_digit


def drawn(text="5", size=120, at=(60, 40), canvas=(200, 240), ink=0, paper=255, mode="L"):
    """Return an image of a character about `size` pixels high."""
    image = Image.new(mode, canvas, paper)
    ImageDraw.Draw(image).text(at, text, ink, ImageFont.load_default(size))
    return image


def digit_of(image, tmp_path, name="picture.png", invert=None, **how):
    path = tmp_path / name
    image.save(path, **how)
    return to_digit(read_gray(path), invert)


def difference(one, other):
    """Return the mean absolute difference, the least over shifts by one pixel."""
    shifts = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    return min(np.abs(np.roll(one.astype(float), shift, (0, 1)) - other).mean() for shift in shifts)


@pytest.fixture
def expected(tmp_path):
    return digit_of(drawn(), tmp_path)


def test_digit_is_scaled_and_centred_as_in_mnist(expected):
    assert expected.shape == (SIDE, SIDE)
    assert expected.dtype == np.uint8
    rows, columns = np.nonzero(expected > 20)
    assert max(np.ptp(rows), np.ptp(columns)) + 1 == pytest.approx(BOX, abs=1)
    y, x = np.indices(expected.shape)
    assert np.average(y, weights=expected) == pytest.approx(CENTRE, abs=0.51)
    assert np.average(x, weights=expected) == pytest.approx(CENTRE, abs=0.51)
    assert expected.max() == 255
    assert np.median(expected) == 0


def test_proportions_are_kept(tmp_path):
    one = digit_of(drawn("1"), tmp_path)
    rows, columns = np.nonzero(one > 20)
    assert np.ptp(rows) + 1 == pytest.approx(BOX, abs=1)
    assert np.ptp(columns) + 1 <= BOX / 2


@pytest.mark.parametrize(
    "image",
    [
        pytest.param(drawn(ink=255, paper=0), id="light on dark"),
        pytest.param(drawn(ink=90, paper=140), id="low contrast"),
        pytest.param(drawn(at=(2, 100)), id="in a corner"),
        pytest.param(drawn(size=240, at=(120, 80), canvas=(400, 480)), id="twice as large"),
        pytest.param(drawn(canvas=(900, 300)), id="wide sheet"),
        pytest.param(drawn(mode="1", ink=0, paper=1), id="bilevel"),
        pytest.param(drawn(mode="RGB", ink="navy", paper="khaki"), id="colour"),
        pytest.param(drawn(mode="RGB", ink="yellow", paper="purple"), id="light colour on dark"),
        pytest.param(drawn(mode="RGB", ink="navy", paper="khaki").quantize(8), id="palette"),
        pytest.param(drawn(mode="LA", ink=(0, 255), paper=(255, 255)), id="opaque alpha"),
        pytest.param(drawn(mode="RGBA", ink="black", paper=(0, 0, 0, 0)), id="black, transparent"),
        pytest.param(drawn(mode="RGBA", ink="white", paper=(9, 9, 9, 0)), id="white, transparent"),
    ],
)
def test_size_place_colour_and_polarity_do_not_matter(image, expected, tmp_path):
    # different digits differ by at least 14
    assert difference(digit_of(image, tmp_path), expected) < 12


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a.png", {}),
        ("a.jpg", {"quality": 60}),
        ("a.webp", {}),
        ("a.bmp", {}),
        ("a.gif", {}),
        ("a.tif", {}),
        ("a.pgm", {}),
    ],
)
def test_formats_do_not_matter(name, how, expected, tmp_path):
    assert difference(digit_of(drawn(), tmp_path, name, **how), expected) < 3


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_depth_does_not_matter(mode, expected, tmp_path):
    deep = np.asarray(drawn()).astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode])
    image = Image.fromarray(deep * 257 if mode != "F" else deep / 255)
    assert image.mode == mode
    assert difference(digit_of(image, tmp_path, "a.tif"), expected) < 1


def test_transparent_corners_are_background(expected, tmp_path):
    image = drawn(mode="RGB", ink="black", paper="white")
    mask = Image.new("L", image.size, 0)
    ImageDraw.Draw(mask).rounded_rectangle([0, 0, image.width - 1, image.height - 1], 30, 255)
    image.putalpha(mask)
    assert difference(digit_of(image, tmp_path), expected) < 1


def test_exif_orientation_is_applied(expected, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise
    turned = drawn().transpose(Image.Transpose.ROTATE_90)
    assert difference(digit_of(turned, tmp_path, "a.jpg", exif=exif), expected) < 3


def test_uneven_light_and_noise_are_removed(expected):
    sheet = np.asarray(drawn()) / 255
    y, x = np.mgrid[-1 : 1 : sheet.shape[0] * 1j, -1 : 1 : sheet.shape[1] * 1j]
    light = 150 + 40 * x - 25 * y - 30 * (x * x + y * y)
    noise = np.random.default_rng(0).normal(0, 4, sheet.shape)
    photo = np.clip(light * (0.3 + 0.7 * sheet) + noise, 0, 255).astype(np.uint8)
    assert difference(to_digit(photo), expected) < 12


def test_dust_is_removed(expected):
    sheet = np.asarray(drawn()).copy()
    sheet[3:5, 3:5] = sheet[230:232, 190:192] = 0
    assert difference(to_digit(sheet), expected) < 1


def test_digit_in_two_parts():
    parts = Image.new("L", (300, 300), 255)
    draw = ImageDraw.Draw(parts)
    draw.line([(140, 40), (240, 40)], fill=0, width=16)  # the bar of a five, detached
    draw.line([(120, 60), (120, 140), (200, 180), (110, 250)], fill=0, width=16)
    digit = to_digit(np.asarray(parts))
    rows, _ = np.nonzero(digit > 127)
    top = digit[rows.min()] > 127
    assert top.sum() > 6


def test_invert_overrides_detection(expected):
    sheet = np.asarray(drawn())
    assert np.array_equal(to_digit(sheet, invert=True), expected)
    assert difference(to_digit(255 - sheet, invert=False), expected) < 1
    wrong = to_digit(sheet, invert=False)
    assert wrong is None or difference(wrong, expected) > 20


@pytest.mark.parametrize("shape", [(1, 1), (3, 500), (28, 28), (700, 900)])
def test_blank_image_has_no_digit(shape):
    assert to_digit(np.full(shape, 200, np.uint8)) is None
    noise = np.random.default_rng(0).normal(200, 3, shape)
    assert to_digit(noise.astype(np.uint8)) is None


@settings(deadline=None, max_examples=200)
@given(
    arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=70)),
    st.sampled_from([None, True, False]),
)
def test_random_images_give_a_digit_or_none(gray, invert):
    digit = to_digit(gray, invert)
    if digit is not None:
        assert (digit.shape, digit.dtype) == ((SIDE, SIDE), np.uint8)
        assert digit.max() == 255


def test_mnist_image_is_unchanged():
    digit = to_digit(np.asarray(drawn()))
    assert difference(to_digit(digit), digit) < 4


def test_addresses_are_not_downloaded():
    ((name, file),) = list_pictures("https://host.example/7.png")
    assert name == "https://host.example/7.png"  # a Path has one slash
    with pytest.raises(UserError, match=r"^no such picture, addresses are not downloaded$"):
        read_gray(file)


def test_other_and_damaged_files_raise(tmp_path):
    text, damaged = tmp_path / "note.png", tmp_path / "half.png"
    text.write_text("hello")
    drawn().save(damaged)
    os.truncate(damaged, damaged.stat().st_size // 2)
    for path, says in ((text, "not a picture, or of an unknown"), (damaged, "cannot be read [(]")):
        with pytest.raises(UserError, match=f"^{says}"):
            read_gray(path)


def test_unreadable_picture_names_the_reason_once(unprivileged):
    path = unprivileged / "a.png"
    path.touch(mode=0)
    with pytest.raises(UserError, match=r"^cannot be read \(Permission denied\)$"):
        read_gray(path)


def test_find_pictures_in_files_folders_and_patterns(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "deeper").mkdir(parents=True)
    for name in ("b.png", "a.JPG", "notes.txt", "deeper/c.png", "odd[1].png"):
        (folder / name).write_bytes(b"")

    def names(pattern):
        return [str(path.relative_to(folder)) for path in find_pictures(str(pattern))]

    assert names(folder) == ["a.JPG", "b.png", "odd[1].png"]
    assert names(folder / "*.png") == ["b.png", "odd[1].png"]
    assert names(folder / "**" / "*.png") == ["b.png", "deeper/c.png", "odd[1].png"]
    assert names(folder / "odd[1].png") == ["odd[1].png"]
    assert names(folder / "notes.txt") == ["notes.txt"]  # an explicit name needs no picture suffix


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("empty", "no picture in this folder"),
        ("missing.png", "no such picture"),
        ("*.gif", "no such picture"),
        ("*.txt", "no such picture"),
    ],
)
def test_name_without_pictures_raises(pattern, says, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("")
    (path,) = find_pictures(str(tmp_path / pattern))
    with pytest.raises(UserError, match=f"^{says}$"):
        read_gray(path)


def test_clothes_are_not_cropped():
    """Frame a dark shirt off the centre of a wide white picture."""
    picture = Image.new("L", (280, 140), 255)
    ImageDraw.Draw(picture).rectangle((20, 20, 79, 119), 55)
    expected = np.zeros((SIDE, SIDE))
    expected[9:19, 2:8] = 200
    for gray, invert in (
        (np.asarray(picture), None),
        (255 - np.asarray(picture), None),
        (np.asarray(picture), True),
    ):
        framed = frame(gray, "fashion_mnist", invert)[0].numpy()
        assert framed.dtype == np.uint8
        assert np.abs(framed - expected)[9:19].mean() < 12  # edges are smoothed
        assert framed[:7].max() == framed[21:].max() == 0
    assert frame(np.full((50, 60), 255, np.uint8), "fashion_mnist") is None
    np.testing.assert_array_equal(
        frame(np.asarray(drawn()), "mnist")[0], to_digit(np.asarray(drawn()))
    )


def test_pictures_of_one_size_are_framed_independently(tmp_path):
    pictures = [drawn(text) for text in "1751"]
    digits = [digit_of(picture, tmp_path) for picture in pictures]
    np.testing.assert_array_equal(digits[0], digits[3])


def test_unreadable_folder_raises(unprivileged):
    folder = unprivileged / "pictures"
    folder.mkdir(mode=0)
    (path,) = find_pictures(str(folder))
    with pytest.raises(UserError, match=r"^cannot be read \(Permission denied\)$"):
        read_gray(path)
