"""Accuracy, loss and confusion matrix of predictions for labelled images."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Predictions:
    """Predictions for labelled images."""

    classes: list[str]  # class names by label
    labels: Tensor  # true classes, int64 [N]
    predicted: Tensor  # most probable classes, int64 [N]
    confidence: Tensor  # their probabilities, float32 [N]

    @classmethod
    def of(cls, classes: Sequence[str], labels: Tensor, logits: Tensor) -> "Predictions":
        """Return the predictions of `logits` [N, C], on the CPU."""
        confidence, predicted = logits.cpu().softmax(1).max(1)
        return cls(list(classes), labels.cpu(), predicted, confidence)

    @property
    def mistakes(self) -> Tensor:
        """Mask of the wrong predictions, bool [N]."""
        return self.predicted != self.labels

    @property
    def order(self) -> Tensor:
        """Indices of mistakes by falling confidence, then of hits by rising confidence."""
        return torch.where(self.mistakes, -1 - self.confidence, self.confidence).argsort()

    @property
    def confusion(self) -> Tensor:
        """Confusion matrix int64 [C, C]: rows are true classes, columns predictions."""
        count = len(self.classes)
        pairs = self.labels * count + self.predicted
        return torch.bincount(pairs, minlength=count * count).view(count, count)


def score(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return mean cross-entropy and accuracy of logits [N, C] for labels int64 [N]."""
    accuracy = (logits.argmax(1) == labels).double().mean()
    return F.cross_entropy(logits, labels).item(), accuracy.item()
