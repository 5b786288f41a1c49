"""Comparison of an exported network in ONNX Runtime with its checkpoint in torch."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from app.config.errors import RunError
from app.data.datasets import Split
from app.inference.predictor import Predictor

TOLERANCE = 1e-5  # largest difference of a float32 logit, relative to the largest logit
LOSABLE_SHARE = 0.002  # of the test images that fp16 and int8 may lose: 0.2 points of accuracy
LOSABLE_IMAGES = 2  # that they may lose of a small test set: each of 359 is 0.28 points
OTHER_SIZES = ((12, 12), (37, 64))  # compared, too, where the network takes any size
SAMPLE = 100  # images in each of them


@dataclass
class Parity:
    """Comparison of two predictors over labelled images."""

    images: int  # number of images
    max_abs_difference: float  # largest difference of a logit, in any size; NaN if one is
    largest_logit: float  # largest absolute logit of the original
    differing: int  # number of predictions that differ
    right: int  # number of right predictions of the exported network
    original_right: int  # number of right predictions of the original, in float32

    @property
    def accuracy(self) -> float:
        """Accuracy of the exported network."""
        return self.right / self.images

    @property
    def original_accuracy(self) -> float:
        """Accuracy of the original."""
        return self.original_right / self.images

    def __str__(self) -> str:
        return (
            f"max abs difference {self.max_abs_difference:.2g}, "
            f"{self.differing:,} of {self.images:,} predictions differ, "
            f"accuracy {self.accuracy:.2%} (fp32 in torch: {self.original_accuracy:.2%})"
        )


def compare(exported: Predictor, original: Predictor, split: Split) -> Parity:
    """Run both predictors over `split`, and over other sizes where they take any."""
    ours, reference = exported.logits(split.images), original.logits(split.images)
    differences = [ours - reference]
    for size in OTHER_SIZES if original.any_size else ():
        images = F.interpolate(split.images[:SAMPLE], size)
        differences.append(exported.logits(images) - original.logits(images))
    predicted, expected = ours.argmax(1), reference.argmax(1)
    return Parity(
        images=len(split),
        max_abs_difference=torch.cat(differences).abs().max().item(),
        largest_logit=reference.abs().max().item(),
        differing=int((predicted != expected).sum()),
        right=int((predicted == split.labels).sum()),
        original_right=int((expected == split.labels).sum()),
    )


def check_parity(parity: Parity, exact: bool) -> None:
    """Raise RunError unless the exported network is as good as the original.

    `exact` tells that it computes in float32, as the original does.
    """
    tolerance = TOLERANCE * max(1.0, parity.largest_logit)
    if exact and not parity.max_abs_difference <= tolerance:  # false for NaN
        raise RunError(f"ONNX Runtime and torch differ by more than {tolerance:.2g}: {parity}")
    losable = max(LOSABLE_IMAGES, math.floor(LOSABLE_SHARE * parity.images))
    lost = parity.original_right - parity.right
    if lost > losable:
        raise RunError(f"{lost:,} right predictions are lost, at most {losable} may be: {parity}")
