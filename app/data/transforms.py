"""Normalisation, and random affine distortion of whole batches on their device."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from app.config.schema import AugmentConfig


def normalize(images: Tensor, mean: float, std: float) -> Tensor:
    """Convert pixels from 0 to 255 to float32: (images / 255 - mean) / std."""
    return images.to(torch.float32, copy=True).sub_(255 * mean).mul_(1 / (255 * std))


def draw_affine(count: int, size: int, cfg: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Draw random affine maps from output to input coordinates of `affine_grid`, [count, 2, 3].

    Each is a rotation, a shear, a scaling and a shift, uniform between minus and plus the limits in
    `cfg` for images of `size` pixels a side. `generator` is on the CPU: the same for every device.
    """
    angle, shear, scale, x, y = torch.rand(5, count, generator=generator) * 2 - 1
    angle = angle * math.radians(cfg.rotation)
    shear = torch.tan(shear * math.radians(cfg.shear))
    scale = 1 + scale * cfg.scale
    cos, sin = angle.cos() / scale, angle.sin() / scale
    step = 2 * cfg.shift / size  # pixels to coordinates
    rows = [
        torch.stack([cos, cos * shear - sin, x * step], 1),
        torch.stack([sin, sin * shear + cos, y * step], 1),
    ]
    return torch.stack(rows, 1)


def warp(images: Tensor, maps: Tensor) -> Tensor:
    """Warp images float [N, C, H, W] by maps [N, 2, 3]: bilinear, 0 outside the image."""
    grid = F.affine_grid(maps.to(images.dtype), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
