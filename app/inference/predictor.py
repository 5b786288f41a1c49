"""Predictors: the common interface of checkpoints in torch and files in ONNX Runtime."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from app.config.contents import DataDescription
from app.config.device import pick_device
from app.config.errors import UserError
from app.config.schema import DataConfig, ModelConfig, from_mapping
from app.data.datasets import Dataset, Split, load_dataset
from app.data.transforms import normalize
from app.inference.metrics import score
from app.models import takes_any_size
from app.runs.checkpoint import SPLIT_KEYS, Checkpoint, load_checkpoint
from app.runs.folder import find_checkpoint, network_file

BATCH_SIZE = 1000
EXPORTED = {  # hint by suffix
    ".onnx": "app.predict runtime=onnx takes it",
    ".pt2": "scripts/run_pt2.cpp runs it",
}


@dataclass(eq=False)  # eq=False keeps the hash by identity
class Predictor:
    """A trained network, independent of its runtime."""

    folder: Path  # folder of the file; results are written there
    data: DataDescription
    any_size: bool  # whether images need not be 28x28

    def logits(self, images: Tensor) -> Tensor:
        """Return finite logits float32 [N, classes], on the CPU, for images uint8 [N, 1, H, W]."""
        return check_finite(self.compute_logits(images))

    def compute_logits(self, images: Tensor) -> Tensor:
        """Return `logits`, which may be non-finite."""
        raise NotImplementedError

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise images uint8 [N, 1, H, W] by the statistics of the training pixels."""
        return normalize(images, self.data.mean, self.data.std)


@dataclass(eq=False)
class TorchPredictor(Predictor):
    """A checkpoint's network in torch."""

    checkpoint: Checkpoint  # contents of the file
    config: ModelConfig  # kind of network
    module: nn.Module  # the network, in evaluation mode; takes normalised images

    def compute_logits(self, images: Tensor) -> Tensor:
        """See `Predictor.compute_logits`."""
        return predict_logits(self.module, images, self.data.mean, self.data.std).cpu()


def load_torch(path: str | Path, device: torch.device | str = "cpu") -> TorchPredictor:
    """Load a checkpoint (`best.pt` if `path` is a run folder)."""
    path = network_file(path, "best.pt")
    if path.suffix in EXPORTED:
        raise UserError(f"checkpoint={path}: an exported file; {EXPORTED[path.suffix]}")
    checkpoint = load_checkpoint(path)
    config = checkpoint.model_config
    return TorchPredictor(
        folder=path.parent,
        data=checkpoint.data,
        any_size=takes_any_size(config),
        checkpoint=checkpoint,
        config=config,
        module=checkpoint.network.to(device),
    )


def load_predictor(
    path: str | None, outputs: str = "outputs", runtime: str = "torch", device: str = "auto"
) -> Predictor:
    """Load the network in `path`; None: the network of the newest run under `outputs`."""
    if runtime == "onnx":
        from app.inference.onnx_runtime import load_onnx  # late: importing it is slow

        file = network_file(path or find_checkpoint(outputs, "model.onnx"), "model.onnx")
        return load_onnx(file, device)
    return load_torch(path or find_checkpoint(outputs), pick_device(device))


def load_data(checkpoint: Checkpoint, root: str) -> Dataset:
    """Load the data set of the checkpoint, with the same validation split."""
    values = {key: getattr(checkpoint.data, key) for key in SPLIT_KEYS}
    return load_dataset(from_mapping(DataConfig, {"root": root, "fallback": None, **values}))


def check_finite(logits: Tensor) -> Tensor:
    """Return `logits`; raise a UserError if one is not finite."""
    if not logits.isfinite().all():
        raise UserError("the network's outputs are not finite numbers: its weights are unusable")
    return logits


@torch.no_grad()
def predict_logits(model: nn.Module, images: Tensor, mean: float, std: float) -> Tensor:
    """Return the logits [N, classes] of images uint8 [N, 1, H, W] in evaluation mode."""
    model.eval()
    weight = next(model.parameters())
    parts = [
        model(normalize(part.to(weight.device), mean, std).to(weight.dtype))
        for part in images.split(BATCH_SIZE)
    ]
    return torch.cat(parts)


def evaluate(model: nn.Module, split: Split, data: Dataset) -> tuple[float, float]:
    """Return mean cross-entropy and accuracy of `model` over a split of `data`."""
    return score(predict_logits(model, split.images, data.mean, data.std), split.labels)
