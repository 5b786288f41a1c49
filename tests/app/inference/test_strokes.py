import numpy as np
import pytest
from PIL import Image, ImageDraw

from app.inference.preprocess import to_digit

SIDE = 200


def drawing(*shapes):
    """Return black ink on white: a shape is (method of ImageDraw, arguments)."""
    image = Image.new("L", (SIDE, SIDE), 235)
    for method, *arguments in shapes:
        options = {"width": 9} if method == "line" else {}
        getattr(ImageDraw.Draw(image), method)(*arguments, fill=30, **options)
    return np.asarray(image)


FIVE = (
    ("line", [(120, 60), (80, 60)]),
    ("line", [(80, 60), (78, 95), (115, 100), (118, 135), (75, 140)]),
)
BOX = ("line", [(40, 25), (160, 25), (160, 170), (40, 170), (40, 25)])
OPEN_BOX = ("line", [(50, 30), (155, 30), (155, 170), (40, 170), (40, 40)])
UNDERLINE = ("line", [(60, 165), (145, 158)])
BLOT = ("ellipse", (135, 110, 165, 142))
SPECK = ("rectangle", (20, 20, 22, 22))
STRIP = ("rectangle", (0, 0, 15, SIDE))
MARGIN = ("line", [(25, 0), (25, SIDE)])


@pytest.mark.parametrize("dark", [True, False])
@pytest.mark.parametrize(
    "additions",
    [
        pytest.param([BOX], id="box"),
        pytest.param([OPEN_BOX], id="open box"),
        pytest.param([UNDERLINE], id="underline"),
        pytest.param([BLOT], id="blot"),
        pytest.param([SPECK], id="speck"),
        pytest.param([STRIP], id="strip"),
        pytest.param([MARGIN], id="line of the margin"),
        pytest.param([BOX, BLOT, SPECK, STRIP], id="all"),
    ],
)
def test_other_ink_is_left_out(additions, dark):
    plain, other = drawing(*FIVE), drawing(*FIVE, *additions)
    if not dark:
        plain, other = 255 - plain, 255 - other
    assert np.abs(to_digit(other).astype(int) - to_digit(plain)).mean() < 2


@pytest.mark.parametrize(
    "corners",
    [
        pytest.param([(100, 0), (140, 0), (120, SIDE), (80, SIDE)], id="band through the digit"),
        pytest.param([(0, 0), (SIDE, 0), (SIDE, 150), (0, 190)], id="dark but for a corner"),
        pytest.param([(0, 0), (150, 0), (130, SIDE), (0, SIDE)], id="dark but for a side"),
    ],
)
@pytest.mark.parametrize("depth", [0.45, 0.65])
def test_shadow_is_left_out(corners, depth):
    plain = drawing(*FIVE)
    shadow = Image.new("L", (SIDE, SIDE), 0)
    ImageDraw.Draw(shadow).polygon(corners, fill=255)
    light = 1 - (1 - depth) * np.asarray(shadow) / 255
    assert (
        np.abs(to_digit((plain * light).astype(np.uint8)).astype(int) - to_digit(plain)).mean() < 5
    )


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(BLOT, id="dot"),
        pytest.param(("rectangle", (90, 90, 93, 93)), id="small square"),
        pytest.param(("point", (90, 90)), id="pixel"),
    ],
)
@pytest.mark.parametrize("dark", [True, False])
def test_lone_dot_is_no_digit(shape, dark):
    picture = drawing(shape)
    assert to_digit(picture if dark else 255 - picture) is None


@pytest.mark.parametrize("shape", [BOX, UNDERLINE, MARGIN])
def test_lone_lines_are_kept(shape):
    """They may be a 0 or a 1."""
    assert to_digit(drawing(shape)) is not None


def test_sheet_beyond_the_border_of_the_picture():
    desk = np.full((300, 300), 40, np.uint8)
    desk[60:260, 100:] = drawing(*FIVE)
    assert np.abs(to_digit(desk).astype(int) - to_digit(drawing(*FIVE))).mean() < 2


@pytest.mark.parametrize("invert", [True, None])
def test_shadow_across_a_digit(invert):
    picture = drawing(*FIVE).astype(float)
    picture[:, :100] *= 0.5
    digit = to_digit(picture.astype(np.uint8), invert)
    assert np.abs(digit.astype(int) - to_digit(drawing(*FIVE))).mean() < 8
