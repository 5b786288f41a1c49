import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from app.config.schema import DataConfig, ModelConfig, from_mapping
from app.data.datasets import Dataset, Split, load_dataset
from app.data.transforms import normalize
from app.inference.metrics import score
from app.models import takes_any_size
from app.runs.checkpoint import Checkpoint, load_checkpoint, load_model
from app.runs.folder import find_checkpoint

Runner = Callable[[Tensor], Tensor]
"""Images uint8 [N, 1, H, W] in, logits float32 [N, classes] on the CPU out."""
BATCH_SIZE = 250  # enough for speed; an involution takes megabytes an image in ONNX Runtime


@dataclass
class Network:
    """What predicting needs of a trained network, whatever it runs in.

    Attributes:
        folder: Where it lies, and where what is made with it belongs.
        dataset: What it was trained on, as in `DataConfig.name`.
        fallback_from: The data set that was asked for, when it could not be had.
        classes: What the labels 0, 1, ... stand for.
        any_size: Whether it takes images of another size than 28x28.
        run: The network itself, with the normalisation before it.
    """

    folder: Path
    dataset: str
    fallback_from: str | None
    classes: list[str]
    any_size: bool
    run: Runner


@dataclass
class TrainedModel:
    """A checkpoint, ready to be used.

    Attributes:
        folder: Where the checkpoint lies, and where what is made from it belongs.
        checkpoint: Its content.
        module: The network, on the CPU, in evaluation mode.
    """

    folder: Path
    checkpoint: Checkpoint
    module: nn.Module

    @property
    def classes(self) -> list[str]:
        """What the labels 0, 1, ... stand for."""
        return list(self.checkpoint.data["classes"])

    @property
    def kind(self) -> ModelConfig:
        """What network it is; older checkpoints leave out what was then the only choice."""
        return from_mapping(ModelConfig, self.checkpoint.model_config)

    def network(self, device: torch.device) -> Network:
        """The network in torch."""
        data = self.checkpoint.data
        return Network(
            self.folder,
            data["name"],
            data["fallback_from"],
            self.classes,
            takes_any_size(self.kind),
            torch_runner(self, device),
        )


def load_trained(checkpoint: str | None, outputs: str) -> TrainedModel:
    """Load a checkpoint.

    Args:
        checkpoint: The file or its run folder; None: the best of the newest run that has
            one; a line on stderr says if that is not a finished one.
        outputs: Where runs are.

    Raises:
        UserError: There is no run, or the file is not a usable checkpoint.
    """
    path = Path(checkpoint) if checkpoint is not None else find_checkpoint(outputs)
    content = load_checkpoint(path)
    return TrainedModel(path if path.is_dir() else path.parent, content, load_model(content))


def load_data(checkpoint: Checkpoint, root: str) -> Dataset:
    """The data set that the checkpoint was trained on, split as it was then.

    Raises:
        UserError: The data is damaged, or not here and cannot be downloaded.
    """
    data = checkpoint.data
    return load_dataset(DataConfig(root, data["name"], None, data["val_size"], data["split_seed"]))


def load_test_split(name: str, root: str) -> Split:
    """The test images of a data set.

    Raises:
        UserError: The data is damaged, or not here and cannot be downloaded.
    """
    return load_dataset(DataConfig(root, name, fallback=None, val_size=1)).test


def torch_runner(trained: TrainedModel, device: torch.device) -> Runner:
    """Run the checkpoint's network with torch."""
    module, data = copy.deepcopy(trained.module).to(device), trained.checkpoint.data

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return torch.cat(
            [
                module(normalize(batch.to(device), data["mean"], data["std"])).cpu()
                for batch in images.split(BATCH_SIZE)
            ]
        )

    return run


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
