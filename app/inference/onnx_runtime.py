"""Exported networks in ONNX Runtime."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from app.config.errors import UserError, one_line
from app.config.schema import DataConfig, from_mapping
from app.inference.predictor import Predictor
from app.runs.folder import network_file

IMAGE, PIXELS = "image", "pixels"  # the input: normalised float32, or (`preprocess`) raw uint8
LOGITS, PROBABILITIES, CLASS = "logits", "probabilities", "class"  # the outputs
RUNTIME = f"ONNX Runtime {onnxruntime.__version__}"
ALL_THREADS = 0
BATCH_SIZE = 250  # an involution takes megabytes per image


@dataclass(eq=False)
class OnnxPredictor(Predictor):
    """An exported network in ONNX Runtime; its input is raw pixels or normalised images."""

    session: onnxruntime.InferenceSession

    def logits(self, images: Tensor) -> Tensor:
        """See `Predictor.logits`."""
        (input,) = self.session.get_inputs()
        raw = input.type == "tensor(uint8)"
        results = []
        for batch in images.split(BATCH_SIZE):
            feed = batch if raw else self.normalize(batch)
            results += self.session.run([LOGITS], {input.name: feed.numpy()})
        return torch.from_numpy(np.concatenate(results))


def load_onnx(path: str | Path, device: str = "cpu", threads: int = ALL_THREADS) -> OnnxPredictor:
    """Load a file of `python -m app.export_onnx` (`model.onnx` if `path` is a run folder).

    Raise a UserError if the file is missing, damaged, too new for this ONNX Runtime, or not an
    export of this program, or if the device is not available.
    """
    path = network_file(path, "model.onnx")
    if path.suffix == ".pt":
        export = f"`python -m app.export_onnx checkpoint={path}`"
        raise UserError(f"checkpoint={path}: a checkpoint, export it first with {export}")
    try:
        return onnx_predictor(open_session(path.read_bytes(), device, threads), path.parent)
    except UserError:
        raise
    except Exception as error:  # ONNX Runtime raises many types
        reason = f"{RUNTIME} cannot load it: {one_line(error)}"
        raise UserError(f"checkpoint={path}: {reason}") from error


def onnx_predictor(session: onnxruntime.InferenceSession, folder: Path) -> OnnxPredictor:
    """Return the predictor for an exported file; raise a ValueError if it is not of this program.

    `folder` is where results are written.
    """
    metadata = session.get_modelmeta().custom_metadata_map
    try:
        from_mapping(DataConfig, {"name": metadata["dataset"]}, "data.")
        return OnnxPredictor(
            folder=folder,
            dataset=metadata["dataset"],
            fallback_from=metadata.get("fallback_from"),
            classes=list(json.loads(metadata["classes"])),
            any_size=isinstance(session.get_inputs()[0].shape[-1], str),
            mean=float(metadata["mean"]),
            std=float(metadata["std"]),
            session=session,
        )
    except (KeyError, TypeError, ValueError, UserError) as error:
        reason = f"no {error} in its metadata" if isinstance(error, KeyError) else error
        raise ValueError(f"not a network of `python -m app.export_onnx`: {reason}") from error


def open_session(
    model: bytes, device: str = "cpu", threads: int = ALL_THREADS
) -> onnxruntime.InferenceSession:
    """Load a model into ONNX Runtime on device auto (CUDA if available), cpu, cuda or cuda:N."""
    providers: list[Any] = ["CPUExecutionProvider"]
    here = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if device.startswith("cuda") and not here:
        raise UserError(f"device={device}: this ONNX Runtime has no CUDA, choose from auto, cpu")
    if here and device != "cpu":
        index = device.partition(":")[2] or "0"
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": index}))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal only: errors are raised, too
    options.intra_op_num_threads = threads
    with redirect_stdout(io.StringIO()):  # it prints the errors that it raises
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    if device.startswith("cuda") and "CUDAExecutionProvider" not in session.get_providers():
        raise UserError(f"device={device}: ONNX Runtime cannot use it, choose from auto, cpu")
    return session
