"""ONNX Runtime: load exported files and run them."""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from app.config.errors import UserError
from app.config.schema import DATASETS
from app.data.transforms import normalize
from app.inference.predictor import BATCH_SIZE, Network, Runner
from app.runs.folder import find_newest

IMAGE, PIXELS = "image", "pixels"  # the input: normalised, or raw with `preprocess`
LOGITS, PROBABILITIES, CLASS = "logits", "probabilities", "class"  # the outputs
SIDE = 28
RUNTIME = f"ONNX Runtime {onnxruntime.__version__}"
ALL_THREADS = 0
_EXPORT = "export one with `python -m app.export_onnx`"
_TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}


@dataclass
class _Origin:
    """What an exported file says about itself, in its metadata."""

    dataset: str
    fallback_from: str | None
    classes: list[str]
    mean: float
    std: float


def open_session(
    model: bytes, device: str = "cpu", threads: int = ALL_THREADS
) -> onnxruntime.InferenceSession:
    """Load a model into ONNX Runtime.

    Args:
        model: Content of the file.
        device: auto, cpu, cuda or cuda:N; auto is CUDA where this ONNX Runtime has it.
        threads: On the CPU.

    Raises:
        UserError: This ONNX Runtime has no such device.
    """
    providers: list[Any] = ["CPUExecutionProvider"]
    here = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if device.startswith("cuda") and not here:
        raise UserError(f"device={device}: this ONNX Runtime has no CUDA, choose from auto, cpu")
    if here and device != "cpu":
        index = device.partition(":")[2] or "0"
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": index}))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong comes as an exception
    options.intra_op_num_threads = threads
    # its own way back to the CPU says so on stdout, where the predictions go
    create = functools.partial(onnxruntime.InferenceSession, model, options, enable_fallback=0)
    try:
        session = create(providers=providers)
    except (ValueError, RuntimeError):
        if device != "auto" or len(providers) == 1:
            raise
        session = create(providers=providers[1:])
    if device.startswith("cuda") and "CUDAExecutionProvider" not in session.get_providers():
        raise UserError(f"device={device}: ONNX Runtime cannot use it, choose from auto, cpu")
    return session


def session_runner(session: onnxruntime.InferenceSession, mean: float, std: float) -> Runner:
    """Run an exported network, whose input may be raw pixels or normalised.

    Args:
        session: The network; the first output are the logits.
        mean: Of the pixels in [0, 1] that the network was trained on.
        std: Their standard deviation.
    """
    (input,) = session.get_inputs()
    raw = _TYPES[input.type] == np.uint8

    def run(images: Tensor) -> Tensor:
        batches = [
            (batch if raw else normalize(batch, mean, std)).numpy()
            for batch in images.split(BATCH_SIZE)
        ]
        results = [session.run([LOGITS], {input.name: batch})[0] for batch in batches]
        return torch.cat([torch.from_numpy(logits) for logits in results])

    return run


def load_exported(checkpoint: str | None, outputs: str, device: str) -> Network:
    """Load what `python -m app.export_onnx` wrote.

    Args:
        checkpoint: The file, or a run folder, which stands for its `model.onnx`; None: the newest
            `model.onnx` of any run.
        outputs: Where runs are.
        device: As for `open_session`.

    Raises:
        UserError: There is no such file, or it is damaged, too new for this ONNX Runtime, or not an
            export of this program.
    """
    path = Path(checkpoint) if checkpoint is not None else find_exported(outputs)
    try:
        if path.is_dir():
            path = path / "model.onnx"
            if not path.is_file():
                raise UserError(f"checkpoint={path}: not there: {_EXPORT}")
        if path.suffix == ".pt" and path.is_file():
            export = f"`python -m app.export_onnx checkpoint={path}`"
            raise UserError(f"checkpoint={path}: a checkpoint, export it first with {export}")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"checkpoint={path}: cannot be read: {error.strerror}") from error
    try:
        session = open_session(content, device)
    except UserError:
        raise
    except Exception as error:  # of a type for every way to be wrong
        raise UserError(f"checkpoint={path}: {_why(error)}") from error
    try:
        about = _read_origin(session.get_modelmeta().custom_metadata_map)
        any_size = _check_interface(session, len(about.classes))
    except ValueError as error:
        raise UserError(
            f"checkpoint={path}: not a network of `python -m app.export_onnx`: {error}"
        ) from error
    run = session_runner(session, about.mean, about.std)
    try:
        finite = bool(run(torch.zeros(2, 1, SIDE, SIDE, dtype=torch.uint8)).isfinite().all())
    except Exception as error:
        raise UserError(f"checkpoint={path}: {_why(error)}") from error
    if not finite:
        raise UserError(f"checkpoint={path}: damaged: its logits are not finite")
    return Network(path.parent, about.dataset, about.fallback_from, about.classes, any_size, run)


def find_exported(outputs: str | Path) -> Path:
    """The newest `model.onnx` anywhere under `outputs`.

    Raises:
        UserError: There is none.
    """
    newest = find_newest(outputs, "model.onnx")
    if newest is None:
        raise UserError(f"no model.onnx under {outputs}/: {_EXPORT}")
    return newest


def _read_origin(about: Mapping[str, str]) -> _Origin:
    """Raise ValueError unless the metadata is this program's."""
    missing = [key for key in ("dataset", "classes", "mean", "std") if key not in about]
    if missing:
        raise ValueError(f"its metadata has no {missing[0]!r}")
    try:
        classes = json.loads(about["classes"])
        mean, std = float(about["mean"]), float(about["std"])
    except ValueError as error:
        raise ValueError(f"its metadata is damaged ({error})") from error
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"its classes are {about['classes']}")
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(f"mean {mean} and std {std} of the pixels")
    if about["dataset"] not in DATASETS:
        raise ValueError(f"it was trained on {about['dataset']!r}")
    return _Origin(about["dataset"], about.get("fallback_from"), classes, mean, std)


def _check_interface(session: onnxruntime.InferenceSession, classes: int) -> bool:
    """Whether it takes images of any size; raise ValueError unless logits of images come out."""
    inputs, outputs = session.get_inputs(), {item.name: item for item in session.get_outputs()}
    found = ", ".join(f"{item.name} {item.type} {item.shape}" for item in inputs)
    sizes = inputs[0].shape if len(inputs) == 1 and inputs[0].type in _TYPES else []
    dynamic = [isinstance(size, str) for size in sizes]
    fixed = dynamic == [True, False, False, False] and sizes[1:] == [1, SIDE, SIDE]
    any_size = dynamic == [True, False, True, True] and sizes[1] == 1
    if not (fixed or any_size):
        raise ValueError(f"it takes {found}, not float or uint8 [batch, 1, {SIDE}, {SIDE}]")
    logits = outputs.get(LOGITS)
    if logits is None or logits.type != "tensor(float)" or logits.shape[1:] != [classes]:
        found = ", ".join(f"{item.name} {item.type} {item.shape}" for item in outputs.values())
        raise ValueError(f"it gives {found}, not {LOGITS} float [batch, {classes}]")
    return any_size


def _why(error: Exception) -> str:
    """ONNX Runtime's message in a line, without where in its sources it was thrown."""
    text = " ".join(str(error).split())
    if "INVALID_PROTOBUF" in text or "No graph was found" in text:
        return "damaged, or not an ONNX model"
    if newer := re.search(r"Opset (\d+) is under development.* till opset (\d+)", text):
        return f"written in opset {newer[1]}, this ONNX Runtime reads up to {newer[2]}"
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = text.removeprefix("Exception during initialization: ")
    text = re.sub(r"^/\S+:\d+ .*?\((?:[^()]|\([^()]*\))*\) ", "", text)
    return f"ONNX Runtime cannot run it: {text}"
