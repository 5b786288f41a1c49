from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from app.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, load_model
from app.config import DataConfig
from app.data import Split, load_dataset, normalize

Runner = Callable[[Tensor], Tensor]
"""Images uint8 [N, 1, 28, 28] in, logits float32 [N, classes] on the CPU out."""

BATCH_SIZE = 1000


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


def load_trained(checkpoint: str | None, outputs: str) -> TrainedModel:
    """Load a checkpoint.

    Args:
        checkpoint: The file or its run folder; None: the best of the newest run.
        outputs: Where runs are.

    Raises:
        UserError: There is no run, or the file is not a usable checkpoint.
    """
    path = Path(checkpoint) if checkpoint is not None else find_checkpoint(outputs)
    content = load_checkpoint(path)
    return TrainedModel(path if path.is_dir() else path.parent, content, load_model(content))


def load_test_split(checkpoint: Checkpoint, root: str) -> Split:
    """The test images of the data set that the checkpoint was trained on.

    Raises:
        UserError: The data is damaged, or not here and cannot be downloaded.
    """
    data = checkpoint.data
    cfg = DataConfig(root, data["name"], None, data["val_size"], data["split_seed"])
    return load_dataset(cfg).test


def torch_runner(trained: TrainedModel, device: torch.device) -> Runner:
    """Run the checkpoint's network with torch."""
    module, data = trained.module.to(device), trained.checkpoint.data

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return torch.cat(
            [
                module(normalize(batch.to(device), data["mean"], data["std"])).cpu()
                for batch in images.split(BATCH_SIZE)
            ]
        )

    return run


def onnx_runner(model: bytes, mean: float, std: float) -> Runner:
    """Run an exported network with ONNX Runtime.

    Args:
        model: Content of the file; its input are the normalised images.
        mean: Of the pixels in [0, 1] that the network was trained on.
        std: Their standard deviation.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: its warnings are about its own optimisations
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (input,) = session.get_inputs()

    def run(images: Tensor) -> Tensor:
        batches = [normalize(batch, mean, std).numpy() for batch in images.split(BATCH_SIZE)]
        return torch.cat([torch.from_numpy(session.run(None, {input.name: b})[0]) for b in batches])

    return run
