import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app.data import Dataset, Split, normalize


@torch.no_grad()
def predict_logits(
    model: nn.Module, images: Tensor, mean: float, std: float, batch_size: int = 1000
) -> Tensor:
    """Logits float32 [N, C] of `model`, in evaluation mode, for images uint8 [N, 1, 28, 28]."""
    model.eval()
    dtype = next(model.parameters()).dtype
    parts = [model(normalize(part, mean, std).to(dtype)) for part in images.split(batch_size)]
    return torch.cat(parts)


def evaluate(
    model: nn.Module, split: Split, data: Dataset, batch_size: int = 1000
) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of `model` over a split of `data`."""
    return score(predict_logits(model, split.images, data.mean, data.std, batch_size), split.labels)


def score(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of logits [N, C] for labels int64 [N]."""
    accuracy = (logits.argmax(1) == labels).double().mean()
    return F.cross_entropy(logits, labels).item(), accuracy.item()
