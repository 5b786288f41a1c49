"""Comparison of an exported network with its checkpoint in torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from app.config.errors import RunError
from app.data.datasets import Split
from app.inference.predictor import Predictor

TOLERANCE = 1e-5  # largest difference of a float32 logit, relative to the largest logit
MAX_LOST_SHARE = 0.002  # of the test images: 0.2 points of accuracy in fp16 and int8
MAX_LOST_IMAGES = 2  # at least, for small test sets: 1 of 359 images is 0.28 points
OTHER_SIZES = ((12, 12), (37, 64))  # compared, too, if the network takes any size
SAMPLE = 100  # images of each other size


@dataclass
class Parity:
    """Comparison of two predictors over labelled images."""

    images: int  # number of images
    max_abs_difference: float  # largest difference of a logit, over all sizes; may be NaN
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


def compare(exported: Callable[[Tensor], Tensor], original: Predictor, split: Split) -> Parity:
    """Compare logits on the images of `split` and, if any size is allowed, of `OTHER_SIZES`."""
    ours, reference = exported(split.images), original.compute_logits(split.images)
    differences = [ours - reference]
    for size in OTHER_SIZES if original.any_size else ():
        images = F.interpolate(split.images[:SAMPLE], size)
        differences.append(exported(images) - original.compute_logits(images))
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
    """Raise a RunError for too many lost predictions or (`exact`) a difference of logits."""
    tolerance = TOLERANCE * max(1.0, parity.largest_logit)
    if exact and not parity.max_abs_difference <= tolerance:  # false for NaN
        raise RunError(f"its logits differ from torch's by more than {tolerance:.2g}: {parity}")
    allowed = max(MAX_LOST_IMAGES, math.floor(MAX_LOST_SHARE * parity.images))
    lost = parity.original_right - parity.right
    if lost > allowed:
        raise RunError(f"{lost:,} right predictions are lost, at most {allowed} may be: {parity}")
