import math

import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import affine

from app.config.schema import AugmentConfig
from app.data.transforms import draw_affine, warp


def draw(count=1000, **limits):
    return draw_affine(count, 28, AugmentConfig(**limits), torch.Generator().manual_seed(0))


def test_zero_limits_are_the_identity():
    images = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(warp(images, draw(3)), images, rtol=0, atol=1e-5)


def test_shift_by_whole_pixels():
    images = torch.rand(1, 1, 28, 28)
    right = torch.tensor([[[1.0, 0, -2 / 28 * 3], [0, 1, 0]]])
    moved = warp(images, right)
    torch.testing.assert_close(moved[..., 3:], images[..., :-3], rtol=0, atol=1e-5)
    assert moved[..., :3].abs().max() < 1e-4  # background


@pytest.mark.parametrize("angle", [-30.0, 15.0])
def test_rotation_matches_torchvision(angle):
    images = torch.rand(2, 1, 28, 28)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    maps = torch.tensor([[[cos, -sin, 0.0], [sin, cos, 0.0]]]).expand(2, 2, 3)
    theirs = affine(images, -angle, [0, 0], 1.0, [0.0], InterpolationMode.BILINEAR)
    torch.testing.assert_close(warp(images, maps), theirs, rtol=0, atol=1e-4)


def test_limits_are_kept_and_reached():
    shift = draw(shift=2)
    assert torch.equal(shift[:, :, :2], torch.eye(2).expand(1000, 2, 2))
    assert 1.9 < shift[:, :, 2].abs().max() * 14 <= 2
    angle = torch.atan2(*draw(rotation=20)[:, :, 0].T.flip(0)).rad2deg()
    assert -20 <= angle.min() < -19
    assert 19 < angle.max() <= 20
    area = draw(scale=0.1)[:, :, :2].det().rsqrt()
    assert 0.9 <= area.min() < 0.905
    assert 1.095 < area.max() <= 1.1
    shear = draw(shear=10)[:, 0, 1].atan().rad2deg()
    assert 9.9 < shear.abs().max() <= 10
    assert torch.equal(draw(shear=10)[:, :, 0], torch.tensor([1.0, 0]).expand(1000, 2))


def test_rotation_and_shear_keep_the_area():
    area = draw(rotation=30, shear=20)[:, :, :2].double().det()
    torch.testing.assert_close(area, torch.ones(1000, dtype=torch.float64), rtol=0, atol=1e-6)


def test_augmentation_keeps_the_ink():
    images = torch.zeros(500, 1, 28, 28)
    images[:, :, 8:20, 10:18] = 1
    warped = warp(images, draw(500, rotation=15, shift=2, scale=0.1, shear=10))
    assert warped.sum() / images.sum() == pytest.approx(1, abs=0.03)
    assert not torch.equal(warped[0], warped[1])
