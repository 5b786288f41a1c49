import dataclasses
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import onnx
import torch
from onnx import ModelProto
from onnx.shape_inference import infer_shapes

from app.config.errors import RunError, UserError, WriteError
from app.config.schema import ExportConfig, choices_of
from app.data.datasets import Dataset
from app.data.transforms import normalize
from app.export.graph import convert, layout, newest_opset
from app.export.model_card import write_card
from app.export.parity import compare, refuse_if_different
from app.export.quantize import quantize
from app.inference.onnx_runtime import RUNTIME
from app.inference.predictor import TrainedModel, load_data, load_trained
from app.runs.files import write_atomically


def export(cfg: ExportConfig) -> None:
    """Export a checkpoint to an ONNX file beside it, once the result has been checked.

    Raises:
        UserError: The settings do not fit together, or the checkpoint or its data cannot be used.
        RunError: The result is not the network that went in; it is kept as `<file>.rejected`.
    """
    check_settings(cfg)
    trained = load_trained(cfg.checkpoint, cfg.outputs)
    path = target(cfg, trained)
    rejected = path.with_name(path.name + ".rejected")
    dataset = load_data(trained.checkpoint, cfg.data.root)
    with _quiet():
        try:
            model = convert(trained, cfg)
        except ValueError as error:
            raise UserError(f"opset={cfg.opset}: {error}") from error
        if cfg.quantize:
            model = quantize(model, calibration_images(dataset, trained, cfg))
    onnx.helper.set_model_props(model, metadata(trained, cfg))
    try:
        model = check(model)
        parity = compare(model, trained, dataset.test)
        refuse_if_different(parity, exact=cfg.precision == "fp32" and cfg.quantize is None)
    except Exception as error:  # of onnx, ONNX Runtime or ours: whatever is wrong with the model
        kept = ""
        with suppress(WriteError):
            write_atomically(rejected, model.SerializeToString())
            kept = f"; the exported model is kept as {rejected}"
        raise RunError(f"{error}{kept}") from error
    model.metadata_props.add(key="test_accuracy", value=json.dumps(parity.accuracy))
    content = model.SerializeToString(deterministic=True)
    write_atomically(path, content)
    rejected.unlink(missing_ok=True)
    card = path.with_suffix(".md")
    write_atomically(card, write_card(path.name, content, trained, cfg, parity).encode())
    print("onnx checker, shape inference: passed")
    print(f"ONNX Runtime and torch: {parity}\nwrote {path}\nwrote {card}")


def check_settings(cfg: ExportConfig) -> None:
    """Raise UserError for settings that each are allowed but not together, or not here."""
    if cfg.opset > newest_opset():
        newest = f"the newest of onnx {onnx.__version__} and {RUNTIME}"
        raise UserError(f"opset={cfg.opset}: choose from 17 to {newest_opset()}, {newest}")
    if cfg.quantize and cfg.precision == "fp16":
        raise UserError("quantize=int8: starts from float32, choose precision=fp32")
    if cfg.quantize and cfg.layout == "function":
        raise UserError("quantize=int8: has no functions, choose layout=standard or leave it out")


def target(cfg: ExportConfig, trained: TrainedModel) -> Path:
    """The file to write.

    Raises:
        UserError: `cfg.file` does not name one that can be written.
    """
    if cfg.file is None:
        kind = cfg.quantize or ("" if cfg.precision == "fp32" else cfg.precision)
        return trained.folder / (f"model-{kind}.onnx" if kind else "model.onnx")
    path = Path(cfg.file)
    if path.suffix != ".onnx":
        raise UserError(f"file={cfg.file}: must end with .onnx")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"file={cfg.file}: {path.parent} is not a folder that can be written to")
    return path


def calibration_images(dataset: Dataset, trained: TrainedModel, cfg: ExportConfig) -> torch.Tensor:
    """The validation images as the exported model takes them."""
    data = trained.checkpoint.data
    images = dataset.val.images
    return images if cfg.preprocess else normalize(images, data["mean"], data["std"])


def check(model: ModelProto) -> ModelProto:
    """Check the model by onnx's rules.

    Returns:
        The model with the shape of every value, as onnx infers it.

    Raises:
        ValidationError, InferenceError: onnx's, where a rule is broken.
    """
    del model.graph.value_info[:]  # torch's guesses; strict inference must do without
    model = infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(model, full_check=True)
    return model


def metadata(trained: TrainedModel, cfg: ExportConfig) -> dict[str, str]:
    """What the model's file says about its origin; numbers and lists as JSON."""
    checkpoint = trained.checkpoint
    data = checkpoint.data
    versions = checkpoint.versions | {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "onnx": onnx.__version__,
    }
    kind = dataclasses.asdict(trained.kind)
    settings = dataclasses.asdict(cfg) | {"layout": layout(cfg)}
    kept = ("exporter", "layout", "opset", "preprocess", "postprocess", "precision", "quantize")
    values = {
        "dataset": data["name"],
        "fallback_from": data["fallback_from"],
        "classes": trained.classes,
        "mean": data["mean"],
        "std": data["std"],
        "model": {key: kind[key] for key in ("name", *choices_of(trained.kind.name))},
        "export": {key: settings[key] for key in kept},
        "revision": revision(),
        "versions": versions,
    }
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
        if value is not None
    }


def revision() -> str | None:
    """The git commit that this program is at, `-dirty` where it was changed; None without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the user what exporter and quantizer log about their own work."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
