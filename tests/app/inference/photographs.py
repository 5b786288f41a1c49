"""Draw photographs of handwritten digits: paper on a desk, shadows, boxes, blots, lines, slates.

`photograph` draws a digit in ink on a sheet, puts the sheet in perspective on a desk, lights the
scene and passes it through a camera: blur, noise and JPEG. Every length is a share of the shorter
side of the picture, and every shade a share of white.
"""

import io
from functools import partial

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

SITUATIONS = (
    "plain",
    "desk",
    "strip",
    "shadow",
    "box",
    "blot",
    "underlined",
    "blackboard",
    "slate",
    "sticker",
)
SHEET = 640  # pixels of the longer side of a sheet before it is put in perspective


def photograph(digit, situation, random, side=420):
    """Return a photograph [H, W] of a digit (uint8 [h, w], bright on black).

    `situation` is one of SITUATIONS; `side` is the number of pixels of the longer side.
    """
    height, width = _shape(random, side)
    if situation == "sticker":
        return _sticker(digit, random, height, width)
    sheet = _sheet(digit, situation, random, height / width)
    if situation in ("blackboard", "slate"):
        board, chalk = random.uniform(0.1, 0.35), random.uniform(0.65, 0.95)
        surface = board + (chalk - board) * sheet
        scene = _in_perspective(surface, _corners("plain", random), (height, width), board)
        scene = scene * (1 + random.uniform(0, 0.1) * _texture(random, height, width, (9, 9)))
        if situation == "slate":  # in a light frame
            frame = int(side * random.uniform(0.03, 0.25))
            scene = np.pad(scene, frame, constant_values=random.uniform(0.6, 0.97))
            height, width = scene.shape
    else:
        paper, ink = random.uniform(0.75, 0.97), random.uniform(0.05, 0.4)
        surface = paper + (ink - paper) * sheet
        desk = _desk(random, height, width)
        scene = _in_perspective(surface, _corners(situation, random), (height, width), desk)
    light = _light(random, height, width)
    if situation == "shadow":
        light = light * _shadow(random, height, width)
    return _camera(scene * light, random)


def _shape(random, side):
    shorter = int(side * random.uniform(0.65, 1))
    return (side, shorter) if random.random() < 0.5 else (shorter, side)


def _sheet(digit, situation, random, aspect):
    """Return the ink on a sheet, 0 to 1, whose sides have the ratio `aspect`."""
    shape = tuple(int(SHEET * min(1, ratio)) for ratio in (aspect, 1 / aspect))
    largest = 0.55 if situation == "desk" else 0.4  # only a part of the other sheets is seen
    size = int(min(shape) * random.uniform(0.2, largest))
    glyph = _pen(digit, size, random)
    room = np.array(shape) - glyph.shape
    top, left = (room * random.uniform(0.42, 0.58, 2)).astype(int)
    bottom, right = top + glyph.shape[0], left + glyph.shape[1]
    ink = np.zeros(shape)
    ink[top:bottom, left:right] = glyph
    width = int(size * random.uniform(0.03, 0.09))
    gap = size * random.uniform(0.12, 0.3) + width
    if situation == "box":
        box = _corner_points(top - gap, left - gap, bottom + gap, right + gap)
        ink = np.maximum(ink, _strokes([[*box, box[0]]], shape, width, random, size * 0.03))
    elif situation == "underlined":
        over = size * random.uniform(0, 0.5)
        line = [(left - over, bottom + gap), (right + over, bottom + gap)]
        ink = np.maximum(ink, _strokes([line], shape, width, random, size * 0.05))
    elif situation == "blot":
        radius = size * random.uniform(0.08, 0.25)
        side = random.choice([-1, 1])
        x = right + gap + radius if side > 0 else left - gap - radius
        y = random.uniform(top, bottom)
        ink = np.maximum(ink, _blot(shape, x, y, radius, random))
    return ink


def _pen(digit, size, random):
    """Enlarge a digit to `size` pixels with the sharp edges and the width of a pen."""
    box = ndimage.find_objects((digit > 60).astype(int))[0]
    cropped = np.pad(digit[box], 2)
    scale = size / (max(cropped.shape) - 4)
    target = tuple(round(length * scale) for length in reversed(cropped.shape))
    large = np.asarray(Image.fromarray(cropped).resize(target, Image.Resampling.BICUBIC)) / 255
    smooth = ndimage.gaussian_filter(large, scale * 0.6)
    middle = random.uniform(0.25, 0.5)  # a higher level: a narrower pen
    return np.clip((smooth - middle) * 6 + 0.5, 0, 1)


def _corner_points(top, left, bottom, right):
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _strokes(lines, shape, width, random, wobble):
    """Draw lines by hand: their points are moved by up to `wobble` pixels."""
    image = Image.new("L", shape[::-1])
    draw = ImageDraw.Draw(image)
    for points in lines:
        moved = np.array(points) + random.uniform(-wobble, wobble, (len(points), 2))
        draw.line([tuple(point) for point in moved], fill=255, width=max(2, width), joint="curve")
    return np.asarray(image) / 255


def _blot(shape, x, y, radius, random):
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    radii = ndimage.gaussian_filter1d(random.normal(0, 0.5, 24), 1.5, mode="wrap")
    radii = radius * np.clip(1 + radii, 0.6, 1.6)
    squeeze = random.uniform(0.7, 1)
    points = zip(x + radii * np.cos(angles), y + squeeze * radii * np.sin(angles), strict=True)
    image = Image.new("L", shape[::-1])
    ImageDraw.Draw(image).polygon([tuple(point) for point in points], fill=255)
    return np.asarray(image) / 255


def _corners(situation, random):
    """Return the corners of the sheet, shares (x, y) of the sides of the picture."""
    square = np.array(_corner_points(-1, -1, 1, 1)) / 2

    def rotation(degrees):
        turn = np.radians(degrees)
        return np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])

    tilt = 1 + random.uniform(-0.08, 0.08, (4, 1))  # perspective
    turned = square * tilt @ rotation(random.uniform(-15, 15))
    if situation == "desk":
        size = random.uniform(0.45, 0.75)
        return turned * size + random.uniform(-1, 1, 2) * (0.9 - size) / 2 + 0.5
    if situation == "strip":
        edges = np.full((2, 2), 0.7)  # left and top, right and bottom, from the middle
        edges[random.integers(2), random.integers(2)] = 0.5 - random.uniform(0.05, 0.18)
        moved = np.where(square < 0, -edges[0], edges[1])
        return moved @ rotation(random.uniform(-4, 4)) + 0.5
    return turned * 1.45 + 0.5  # beyond the picture on every side


def _in_perspective(surface, corners, shape, background):
    """Put `surface` on `background` so that its corners lie at `corners`."""
    height, width = shape
    target = np.array(corners) * (width, height)
    source = _corner_points(0, 0, *surface.shape)
    rows = []
    for (x, y), (u, v) in zip(target, source, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    coefficients = np.linalg.solve(np.array(rows), np.array(source).ravel())
    warp = partial(
        Image.Image.transform,
        size=(width, height),
        method=Image.Transform.PERSPECTIVE,
        data=coefficients.tolist(),
    )
    placed = np.asarray(warp(Image.fromarray(surface.astype(np.float32)), resample=2))
    inside = Image.fromarray(np.full(surface.shape, 255, np.uint8))
    mask = ndimage.uniform_filter(np.asarray(warp(inside), dtype=np.float64) / 255, 2)
    return placed * mask + background * (1 - mask)


def _texture(random, height, width, sigmas):
    noise = ndimage.gaussian_filter(random.normal(0, 1, (height, width)), sigmas)
    return noise / max(noise.std(), 1e-9)


def _desk(random, height, width):
    """Return a dark desk: smooth, mottled or of wood."""
    shade = random.uniform(0.08, 0.45)
    sigmas = [(0.5, 0.5), (6, 6), (1.5, 40), (40, 1.5)][random.integers(4)]
    return np.clip(
        shade * (1 + random.uniform(0, 0.25) * _texture(random, height, width, sigmas)), 0, 1
    )


def _light(random, height, width):
    """Return light that falls off to one side and to the corners."""
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    slope = random.uniform(-0.12, 0.12, 2)
    return random.uniform(0.75, 1) * (1 + slope[0] * x + slope[1] * y - 0.08 * (x * x + y * y))


def _shadow(random, height, width):
    """Return a shadow with one or two straight edges: the rest of a hand, a phone or a window."""
    y, x = np.mgrid[-0.5 : 0.5 : height * 1j, -0.5 : 0.5 : width * 1j]
    lit = np.zeros((height, width), bool)
    for _ in range(random.integers(1, 3)):
        angle = random.uniform(0, 2 * np.pi)
        lit |= x * np.cos(angle) + y * np.sin(angle) > random.uniform(-0.2, 0.2)
    edge = ndimage.gaussian_filter(lit.astype(np.float64), random.uniform(0.3, 2))
    depth = random.uniform(0.35, 0.7)
    return depth + (1 - depth) * edge


def _camera(scene, random):
    """Blur a scene, add noise and compress it as JPEG."""
    blurred = ndimage.gaussian_filter(scene * 255, random.uniform(0.3, 1.5))
    noisy = blurred + random.normal(0, random.uniform(0, 5), scene.shape)
    file = io.BytesIO()
    picture = Image.fromarray(np.clip(noisy, 0, 255).round().astype(np.uint8))
    picture.save(file, "JPEG", quality=int(random.integers(40, 95)))
    return np.asarray(Image.open(file))


def _sticker(digit, random, height, width):
    """Return a digit in one shade on another, without light or noise."""
    glyph = _pen(digit, int(min(height, width) * random.uniform(0.3, 0.8)), random)
    top, left = ((np.array((height, width)) - glyph.shape) * random.uniform(0, 1, 2)).astype(int)
    dark, bright = random.uniform(0, 0.4), random.uniform(0.6, 1)
    ink, paper = (dark, bright) if random.random() < 0.5 else (bright, dark)
    picture = np.full((height, width), paper)
    picture[top : top + glyph.shape[0], left : left + glyph.shape[1]] += (ink - paper) * glyph
    return (picture * 255).round().astype(np.uint8)
