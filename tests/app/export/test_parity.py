import math

import pytest
import torch
from torch.nn import functional as F

from app.config.errors import RunError
from app.data.datasets import Split
from app.export.parity import Parity, check_parity, compare


def parity(images, lost, difference=0.0):
    return Parity(images, difference, 10.0, lost, images - lost, images)


@pytest.mark.parametrize(
    ("images", "losable"), [(100, 2), (359, 2), (1499, 2), (1500, 3), (10_000, 20)]
)
def test_fp16_and_int8_may_lose_two_images_or_0_2_percent(images, losable):
    check_parity(parity(images, losable), exact=False)
    check_parity(parity(images, -5), exact=False)  # better than the original
    with pytest.raises(RunError, match=f"at most {losable} may be"):
        check_parity(parity(images, losable + 1), exact=False)


@pytest.mark.parametrize("difference", [1.1e-4, float("nan"), float("inf")])
def test_float32_tolerance_is_relative_to_the_largest_logit(difference):
    check_parity(parity(100, 0, 0.9e-4), exact=True)
    check_parity(parity(100, 0, difference), exact=False)
    with pytest.raises(RunError, match=r"by more than 0\.0001"):
        check_parity(parity(100, 0, difference), exact=True)


class Fake:
    """A predictor that returns the given logits."""

    any_size = False

    def __init__(self, logits):
        self.values = logits

    def compute_logits(self, images):
        return self.values


def test_compare_counts_images():
    labels = torch.tensor([0, 1, 2, 0])
    original = F.one_hot(torch.tensor([0, 1, 2, 1]), 3).float()  # the last one is wrong
    exported = F.one_hot(torch.tensor([0, 2, 2, 0]), 3).float()  # the second one is
    exported[0, 0] = 1.5
    split = Split(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), labels)
    result = compare(Fake(exported).compute_logits, Fake(original), split)
    assert result == Parity(4, 1.0, 1.0, differing=2, right=3, original_right=3)
    assert (result.accuracy, result.original_accuracy) == (0.75, 0.75)


def test_compare_reports_nan():
    original = torch.zeros(2, 3)
    exported = original.clone()
    exported[1, 2] = torch.nan
    split = Split(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 0]))
    result = compare(Fake(exported).compute_logits, Fake(original), split)
    assert math.isnan(result.max_abs_difference)
