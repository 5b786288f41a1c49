"""Predictions for labelled images, and what is counted in them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Predictions:
    """What a model makes of labelled images.

    Attributes:
        classes: What the labels 0, 1, ... stand for.
        labels: The truth, int64 [N].
        predicted: The most probable class, int64 [N].
        confidence: Its probability, float32 [N].
    """

    classes: list[str]
    labels: Tensor
    predicted: Tensor
    confidence: Tensor

    @property
    def mistakes(self) -> Tensor:
        """Bool [N]."""
        return self.predicted != self.labels

    @property
    def confusion(self) -> Tensor:
        """How many images of each class (row) were taken for each class (column), int64 [C, C]."""
        count = len(self.classes)
        pairs = self.labels * count + self.predicted
        return torch.bincount(pairs, minlength=count * count).view(count, count)


def score(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of logits [N, C] for labels int64 [N]."""
    accuracy = (logits.argmax(1) == labels).double().mean()
    return F.cross_entropy(logits, labels).item(), accuracy.item()
