"""Ten handwritten digits: strokes of (x, y) points in units of the canvas side."""

import math


def arc(x, y, width, height, start, end, points=14):
    """Return points of an elliptic arc; angles are in degrees, clockwise from the right."""
    angles = (math.radians(start + (end - start) * step / points) for step in range(points + 1))
    return [(x + width / 2 * math.cos(a), y + height / 2 * math.sin(a)) for a in angles]


DIGITS = {
    "0": [arc(0.5, 0.5, 0.4, 0.6, -90, 270)],
    "1": [[(0.52, 0.2), (0.5, 0.5), (0.48, 0.8)]],
    "2": [[*arc(0.5, 0.35, 0.38, 0.3, 190, 385), (0.5, 0.6), (0.3, 0.78), (0.72, 0.78)]],
    "3": [[*arc(0.47, 0.35, 0.36, 0.3, 200, 450), *arc(0.47, 0.65, 0.42, 0.3, -90, 160)]],
    "4": [[(0.38, 0.2), (0.3, 0.52), (0.7, 0.52)], [(0.62, 0.2), (0.6, 0.82)]],
    "5": [[(0.68, 0.2), (0.38, 0.2), (0.35, 0.46), *arc(0.48, 0.61, 0.4, 0.34, 230, 510)]],
    "6": [[(0.6, 0.18), (0.42, 0.4), *arc(0.48, 0.65, 0.32, 0.3, 180, 540)]],
    "7": [[(0.3, 0.22), (0.7, 0.22), (0.55, 0.5), (0.45, 0.8)]],
    "8": [[*arc(0.5, 0.35, 0.3, 0.28, 90, 450), *arc(0.5, 0.65, 0.38, 0.32, -90, 270)]],
    "9": [[*arc(0.48, 0.36, 0.34, 0.3, 0, 360), (0.64, 0.5), (0.6, 0.82)]],
}
