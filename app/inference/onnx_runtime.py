"""Exported networks in ONNX Runtime."""

import functools
import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from app.config.contents import CLASSES, Metadata
from app.config.errors import UserError, one_line
from app.config.schema import from_mapping, printable
from app.inference.onnx_file import read_model
from app.inference.predictor import Predictor
from app.inference.preprocess import SIDE
from app.runs.folder import network_file

IMAGE, PIXELS = "image", "pixels"  # the input: normalised float32, or (`preprocess`) raw uint8
LOGITS, PROBABILITIES, CLASS = "logits", "probabilities", "class"  # the outputs
RUNTIME = f"ONNX Runtime {onnxruntime.__version__}"
ALL_THREADS = 0
BATCH_SIZE = 250  # an involution takes megabytes per image
MEMORY = 2**32  # bytes that the tensors of all sessions may take together
OPEN_SECONDS, RUN_SECONDS = 20.0, 60.0  # longest time of the first image and of a batch
OPENING = Lock()  # of the process: standard output, the allocator


@dataclass(eq=False)
class OnnxPredictor(Predictor):
    """An exported network in ONNX Runtime; its input is raw pixels or normalised images."""

    path: Path  # of the file
    session: onnxruntime.InferenceSession

    @property
    def takes_pixels(self) -> bool:
        """Return whether the input is raw pixels."""
        return self.session.get_inputs()[0].type == "tensor(uint8)"

    def compute_logits(self, images: Tensor) -> Tensor:
        """See `Predictor.compute_logits`."""
        results = []
        for batch in images.split(BATCH_SIZE):
            feed = batch if self.takes_pixels else self.normalize(batch)
            try:
                results.append(run(self.session, feed, RUN_SECONDS))
            except Exception as error:  # ONNX Runtime raises many types
                reason = f"{RUNTIME} cannot run the network: {printable(one_line(error))}"
                raise UserError(f"checkpoint={self.path}: {reason}") from error
        return torch.from_numpy(np.concatenate(results))


def load_onnx(path: str | Path, device: str = "cpu", threads: int = ALL_THREADS) -> OnnxPredictor:
    """Load a file of `python -m app.export_onnx` (`model.onnx` if `path` is a run folder).

    Raise a UserError if the file is unusable or the device is not available.
    """
    path = network_file(path, "model.onnx")
    if path.suffix == ".pt":
        export = f"`python -m app.export_onnx checkpoint={path}`"
        raise UserError(f"checkpoint={path}: a checkpoint, export it first with {export}")
    try:
        content = read_model(path)
        # Run once unoptimised, within the memory limit: constant folding of an untrusted graph has
        # none.
        predictor = onnx_predictor(open_session(content, threads=1, optimize=False), path)
        dtype = torch.uint8 if predictor.takes_pixels else torch.float32
        run(predictor.session, torch.zeros(1, 1, SIDE, SIDE, dtype=dtype), OPEN_SECONDS)
        predictor.session = open_session(content, device, threads)
    except UserError:
        raise
    except Exception as error:  # ONNX Runtime raises many types
        reason = f"{RUNTIME} cannot load it: {printable(one_line(error))}"
        raise UserError(f"checkpoint={path}: {reason}") from error
    return predictor


def onnx_predictor(session: onnxruntime.InferenceSession, path: Path) -> OnnxPredictor:
    """Return the predictor for the file in `path`; raise a ValueError if it is no export."""
    try:
        values = session.get_modelmeta().custom_metadata_map
        data: Metadata = from_mapping(Metadata, values, "metadata.")
        height = _check_signature(session)
    except (UserError, ValueError) as error:
        raise ValueError(f"not a network of `python -m app.export_onnx`: {error}") from error
    return OnnxPredictor(path.parent, data, height != SIDE, path, session)


def _check_signature(session: onnxruntime.InferenceSession) -> int | str | None:
    """Return the height of the input; raise a ValueError if the file is not an export."""
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 else []
    if not (
        len(shape) == 4
        and inputs[0].type in ("tensor(float)", "tensor(uint8)")
        and not isinstance(shape[0], int)
        and shape[1] == 1
        and (shape[2:] == [SIDE, SIDE] or not any(isinstance(size, int) for size in shape[2:]))
    ):
        found = ", ".join(f"{item.name} {item.type} {item.shape}" for item in inputs)
        wanted = f"float or uint8 ['batch', 1, {SIDE}, {SIDE}]"
        raise ValueError(f"its inputs are {found or 'missing'}, not {wanted}")
    outputs = {item.name: item for item in session.get_outputs()}
    logits = outputs.get(LOGITS)
    if not (logits and logits.type == "tensor(float)" and logits.shape[1:] in ([CLASSES], [None])):
        found = f"{logits.type} {logits.shape}" if logits else "missing"
        raise ValueError(f"its output {LOGITS} is {found}, not float ['batch', {CLASSES}]")
    return shape[2]


def run(session: onnxruntime.InferenceSession, images: Tensor, seconds: float) -> Any:
    """Return the logits of a batch; raise a ValueError after `seconds` or for a wrong shape."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    # ends the run after the current node
    timer = Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        (logits,) = session.run([LOGITS], {session.get_inputs()[0].name: images.numpy()}, options)
    except Exception as error:
        if options.terminate:
            raise ValueError(f"it takes more than {seconds:.0f} s") from error
        raise
    finally:
        timer.cancel()
    if logits.shape != (len(images), CLASSES):
        raise ValueError(f"its output {LOGITS} has the shape {list(logits.shape)}")
    return logits


@functools.cache
def _limit_memory() -> None:
    """Give all sessions with `session.use_env_allocators` one arena of at most `MEMORY` bytes."""
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    config = onnxruntime.OrtArenaCfg({"max_mem": MEMORY})
    onnxruntime.create_and_register_allocator(info, config)


def open_session(
    model: bytes, device: str = "cpu", threads: int = ALL_THREADS, optimize: bool = True
) -> onnxruntime.InferenceSession:
    """Load a model into ONNX Runtime on device auto (CUDA if available), cpu, cuda or cuda:N."""
    providers: list[Any] = ["CPUExecutionProvider"]
    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    if device.startswith("cuda") and not has_cuda:
        raise UserError(f"device={device}: this ONNX Runtime has no CUDA, choose from auto, cpu")
    if has_cuda and device != "cpu":
        index = device.partition(":")[2] or "0"
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": index}))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal only: errors are raised, too
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.use_env_allocators", "1")
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with OPENING, redirect_stdout(io.StringIO()):  # ONNX Runtime prints the errors that it raises
        _limit_memory()
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    if device.startswith("cuda") and "CUDAExecutionProvider" not in session.get_providers():
        raise UserError(f"device={device}: ONNX Runtime cannot use it, choose from auto, cpu")
    return session
