import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy import ndimage

from app.inference.paper import DIM, Surface, ink_of


@given(
    arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40)),
    st.integers(0, 30).map(lambda half: 2 * half + 1),
)
def test_background_is_the_closing(gray, side):
    background = ndimage.grey_closing(gray, (side, side)).astype(np.float64)
    expected = (background - gray) * (255 / (background + DIM))
    ink = ink_of(Surface(gray, np.ones(gray.shape, bool), False), side)
    np.testing.assert_array_equal(ink, expected)


def test_ink_beyond_the_sheet_is_0():
    gray = np.full((9, 9), 200, np.uint8)
    gray[4] = 20
    inside = np.zeros(gray.shape, bool)
    inside[:, 3:6] = True
    ink = ink_of(Surface(gray, inside, True), 5)
    assert (ink[4, 3:6] > 0).all() and np.count_nonzero(ink) == 3
