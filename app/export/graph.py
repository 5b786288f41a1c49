"""ONNX graph of a trained network: its inputs, outputs, number format and metadata."""

import copy
import dataclasses
import functools
import json
import platform

import onnx
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from app.config.schema import ExportConfig, package_version
from app.inference.onnx_runtime import CLASS, IMAGE, LOGITS, PIXELS, PROBABILITIES, open_session
from app.inference.predictor import TorchPredictor
from app.inference.preprocess import SIDE
from app.models import describe_model
from ops.export import LEAST_OPSET, Layout, export_onnx

VERSIONS = {
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "onnx": onnx.__version__,
}
BATCH, HEIGHT, WIDTH = "batch", "height", "width"
EXPORT_KEYS = ("exporter", "layout", "opset", "preprocess", "postprocess", "precision", "quantize")


class Deployment(nn.Module):
    """A network with the normalisation, softmax and precision of `cfg`; float32 outside."""

    def __init__(self, original: TorchPredictor, cfg: ExportConfig) -> None:
        super().__init__()
        self.half_precision, network = cfg.precision == "fp16", original.module
        self.network = copy.deepcopy(network).half() if self.half_precision else network
        self.normalize = original.normalize
        self.preprocess, self.postprocess = cfg.preprocess, cfg.postprocess

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return logits; with `postprocess` also probabilities and classes, int64 [N]."""
        if self.preprocess:
            image = self.normalize(image)
        logits = self.network(image.half()).float() if self.half_precision else self.network(image)
        if not self.postprocess:
            return logits
        return logits, logits.softmax(1), logits.argmax(1)


def build_graph(original: TorchPredictor, cfg: ExportConfig) -> ModelProto:
    """Export a network to ONNX in the first of `layouts`, with dynamic batch size.

    Height and width are dynamic if the network takes any size.
    """
    module = Deployment(original, cfg).eval()
    dtype = torch.uint8 if cfg.preprocess else torch.float32
    inputs = [PIXELS if cfg.preprocess else IMAGE]
    outputs = [LOGITS, PROBABILITIES, CLASS] if cfg.postprocess else [LOGITS]
    axes = {name: {0: BATCH} for name in (*inputs, *outputs)}
    if original.any_size:
        axes[inputs[0]] |= {2: HEIGHT, 3: WIDTH}
    model = export_onnx(
        module,
        (torch.zeros(2, 1, SIDE, SIDE, dtype=dtype),),
        exporter=exporter(cfg),  # type: ignore[arg-type]  # the schema checks it
        layout=layouts(cfg)[0],
        opset_version=cfg.opset,
        input_names=inputs,
        output_names=outputs,
        dynamic_axes=axes,
    )
    _document(model, original)
    helper.set_model_props(model, _metadata(original, cfg))
    return model


def layouts(cfg: ExportConfig) -> list[Layout]:
    """Return the layout of each file to write: by default both, for int8 `standard`."""
    if cfg.layout in ("function", "standard"):
        return [cfg.layout]
    return ["standard"] if cfg.quantize else ["function", "standard"]


def exporter(cfg: ExportConfig) -> str:
    """Return the exporter: by default `symbolic` if torch has the TorchScript exporter."""
    torchscript = hasattr(torch.onnx, "register_custom_op_symbolic")
    return cfg.exporter or ("symbolic" if torchscript else "dynamo")


@functools.cache
def newest_opset(quantized: bool = False) -> int:
    """Return the newest opset that onnx and ONNX Runtime support (`quantized`: QuantizeLinear)."""
    node = helper.make_node("QuantizeLinear", ["x", "scale"], ["y"])
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0])
    result = helper.make_tensor_value_info("y", TensorProto.UINT8, [1])
    for opset_version in range(onnx.defs.onnx_opset_version(), LEAST_OPSET, -1):
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        graph = helper.make_graph([], "empty", [value], [value])
        if quantized:
            graph = helper.make_graph([node], "quantized", [value], [result], [scale])
        opset = helper.make_opsetid("", opset_version)
        least_ir = helper.find_min_ir_version_for([opset])
        model = helper.make_model(graph, opset_imports=[opset], ir_version=least_ir)
        try:
            open_session(model.SerializeToString())
        except Exception:  # ONNX Runtime's own types
            continue
        return opset_version
    return LEAST_OPSET


def _document(model: ModelProto, original: TorchPredictor) -> None:
    """Describe the model, its inputs and outputs; remove source locations."""
    texts = {
        IMAGE: f"(pixels / 255 - {original.data.mean:.6f}) / {original.data.std:.6f}",
        PIXELS: "0 to 255, bright on black",
        LOGITS: f"one a class: {', '.join(original.data.classes)}",
        PROBABILITIES: "softmax of the logits",
        CLASS: "index of the largest logit",
    }
    for value in (*model.graph.input, *model.graph.output):
        value.doc_string = texts[value.name]
    model.graph.name = original.config.name
    model.doc_string = f"{describe_model(original.config)} for {original.data.name}"
    model.producer_name, model.producer_version = "lenet-ops", package_version()
    for node in model.graph.node:
        node.doc_string = ""  # source locations


def _metadata(original: TorchPredictor, cfg: ExportConfig) -> dict[str, str]:
    """Return the metadata of the file: strings as they are, other values as JSON."""
    settings = dataclasses.asdict(cfg) | {"layout": layouts(cfg)[0], "exporter": exporter(cfg)}
    values = {
        "dataset": original.data.name,
        "fallback_from": original.data.fallback_from,
        "classes": original.data.classes,
        "mean": original.data.mean,
        "std": original.data.std,
        "model": {"name": original.config.name} | dataclasses.asdict(original.config),
        "export": {key: settings[key] for key in EXPORT_KEYS},
        "versions": VERSIONS,
    }
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
        if value is not None
    }
