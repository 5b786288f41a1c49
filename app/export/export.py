"""Export a checkpoint to ONNX files that agree with torch."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto
from onnx.shape_inference import infer_shapes

from app.config.errors import RunError, UserError
from app.config.schema import ExportConfig
from app.data.datasets import Split, load_test_split
from app.export.graph import build_graph, layouts, newest_opset
from app.export.model_card import write_card
from app.export.outputs import check_files, write_with_card
from app.export.parity import check_parity, compare
from app.export.quantize import quantize
from app.inference.onnx_file import to_bytes
from app.inference.onnx_runtime import RUNTIME, onnx_predictor, open_session
from app.inference.predictor import TorchPredictor, load_data, load_torch
from app.runs.folder import data_root, find_checkpoint


def export(cfg: ExportConfig) -> None:
    """Export a checkpoint to ONNX files with model cards; raise a RunError if the logits differ."""
    check_settings(cfg)
    original = load_torch(cfg.checkpoint or find_checkpoint(cfg.outputs))
    number_format = cfg.quantize or cfg.precision
    name = "model.onnx" if number_format == "fp32" else f"model-{number_format}.onnx"
    path = Path(cfg.file or original.folder / name)
    cards = {file: file.with_suffix(".md") for file in files(cfg, path)}
    check_files(cards, ".onnx", typed=cfg.file is not None)
    test = load_test_split(original.data.name, data_root(original.folder, cfg.data.root))
    for layout, file in zip(layouts(cfg), files(cfg, path), strict=True):
        _export_file(replace(cfg, layout=layout), file, original, test)
    if len(layouts(cfg)) > 1:
        print(f"{path.name} is for ONNX Runtime, {files(cfg, path)[1].name} for other runtimes")


def _export_file(cfg: ExportConfig, path: Path, original: TorchPredictor, test: Split) -> None:
    """Export to one file in one layout; write it only if its parity check passes."""
    with silenced():
        model = build_graph(original, cfg)
        if cfg.quantize:
            root = data_root(original.folder, cfg.data.root)
            images = load_data(original.checkpoint, root).val.images
            images = images if cfg.preprocess else original.normalize(images)
            model = quantize(model, images)
    model = check(model)
    if cfg.quantize:
        del model.graph.value_info[:]  # a fifth of a small file; runtimes infer the shapes
    exported = onnx_predictor(open_session(model.SerializeToString()), path)
    parity = compare(exported.compute_logits, original, test)
    try:
        check_parity(parity, exact=cfg.precision == "fp32" and cfg.quantize is None)
    except RunError as error:
        raise RunError(f"{path} is not written: {error}") from error
    model.metadata_props.add(key="test_accuracy", value=json.dumps(parity.accuracy))
    content = to_bytes(model)
    card = path.with_suffix(".md")
    write_with_card(path, content, card, write_card(path.name, content, original, cfg, parity))
    print("onnx checker, shape inference: passed")
    print(f"ONNX Runtime and torch: {parity}\nwrote {path}\nwrote {card}")


def files(cfg: ExportConfig, path: Path) -> list[Path]:
    """Return the file of each layout."""
    return [path, path.with_stem(f"{path.stem}-standard")][: len(layouts(cfg))]


@contextmanager
def silenced() -> Iterator[None]:
    """Discard warnings that exporters and compilers log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def check_settings(cfg: ExportConfig) -> None:
    """Raise a UserError for conflicting settings or an opset that is not installed."""
    most = newest_opset(quantized=cfg.quantize is not None)
    if cfg.opset > most:
        newest = f"the newest of onnx {onnx.__version__} and {RUNTIME}"
        newest += " for quantize=int8" if cfg.quantize else ""
        raise UserError(f"opset={cfg.opset}: choose from 17 to {most}, {newest}")
    if cfg.quantize and cfg.precision == "fp16":
        raise UserError("quantize=int8: starts from float32, choose precision=fp32")
    if cfg.quantize and cfg.layout in ("function", "both"):
        raise UserError("quantize=int8: has no functions, choose layout=standard or leave it out")


def check(model: ModelProto) -> ModelProto:
    """Run onnx's checker and strict shape inference; return the model with inferred shapes."""
    del model.graph.value_info[:]  # torch's shapes; strict inference must not rely on them
    model = infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(model, full_check=True)
    return model
