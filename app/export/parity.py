"""Comparison of an exported network with the original."""

from dataclasses import dataclass

import numpy as np
import torch
from onnx import ModelProto
from torch.nn import functional

from app.config.errors import RunError
from app.data.datasets import Split
from app.inference.onnx_runtime import open_session, session_runner
from app.inference.predictor import TrainedModel, torch_runner
from app.models import takes_any_size

TOLERANCE = 1e-5  # in logits between torch and ONNX Runtime, as a share of the largest
LOSABLE = 0.002  # accuracy that fp16 and int8 may cost: 0.2 points
OTHER_SIZES = ((12, 12), (37, 64))  # that a network which takes any is compared in, too
SAMPLE = 100  # images in each of them


@dataclass
class Parity:
    """How an exported network compares with the original over labelled images.

    Attributes:
        images: How many.
        max_abs_difference: Largest difference of any logit, in any size that was compared.
        largest_logit: Largest absolute value of the original's logits.
        differing: How many predictions differ.
        accuracy: Of the exported network.
        original_accuracy: Of the original, in float32.
    """

    images: int
    max_abs_difference: float
    largest_logit: float
    differing: int
    accuracy: float
    original_accuracy: float

    def __str__(self) -> str:
        return (
            f"max abs difference {self.max_abs_difference:.2g}, "
            f"{self.differing:,} of {self.images:,} predictions differ, "
            f"accuracy {self.accuracy:.2%} (fp32 in torch: {self.original_accuracy:.2%})"
        )


def compare(model: ModelProto, trained: TrainedModel, split: Split) -> Parity:
    """Run the exported network in ONNX Runtime beside the original in torch, in float32."""
    data = trained.checkpoint.data
    session = open_session(model.SerializeToString())
    run = session_runner(session, data["mean"], data["std"])
    run_original = torch_runner(trained, torch.device("cpu"))
    ours, reference = run(split.images), run_original(split.images)
    differences = [(ours - reference).abs().max().item()]
    if takes_any_size(trained.kind):
        for size in OTHER_SIZES:
            images = functional.interpolate(split.images[:SAMPLE], size)
            differences.append((run(images) - run_original(images)).abs().max().item())
    predicted, original = ours.argmax(1), reference.argmax(1)
    return Parity(
        images=len(split),
        max_abs_difference=float(np.max(differences)),  # NaN if one is
        largest_logit=reference.abs().max().item(),
        differing=int((predicted != original).sum()),
        accuracy=(predicted == split.labels).double().mean().item(),
        original_accuracy=(original == split.labels).double().mean().item(),
    )


def refuse_if_different(parity: Parity, exact: bool) -> None:
    """Raise RunError where the exported network is another.

    Args:
        parity: What was measured.
        exact: Whether it computes in float32 as the original does.
    """
    tolerance = TOLERANCE * max(1.0, parity.largest_logit)
    if exact and not parity.max_abs_difference <= tolerance:  # NaN is not
        raise RunError(f"ONNX Runtime and torch differ by more than {tolerance:.2g}: {parity}")
    if not parity.original_accuracy - parity.accuracy <= LOSABLE:
        raise RunError(f"more than {100 * LOSABLE:g} points of accuracy are lost: {parity}")
