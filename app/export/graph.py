"""The network as a consumer gets it: what goes in, what comes out, in which numbers."""

import copy
import functools

import onnx
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from app.config.schema import ExportConfig
from app.data.transforms import normalize
from app.inference.onnx_runtime import (
    CLASS,
    IMAGE,
    LOGITS,
    PIXELS,
    PROBABILITIES,
    SIDE,
    open_session,
)
from app.inference.predictor import TrainedModel
from app.models import describe_model, takes_any_size
from ops.export import LEAST_OPSET, export_onnx

BATCH, HEIGHT, WIDTH = "batch", "height", "width"


class Deployment(nn.Module):
    """A network between its optional first and last steps; its interface is float32 always.

    Args:
        network: float32 [N, 1, H, W] in, logits [N, classes] out.
        mean: Of the pixels in [0, 1] that it was trained on.
        std: Their standard deviation.
        cfg: Its `preprocess`, `postprocess` and `precision`.
    """

    def __init__(self, network: nn.Module, mean: float, std: float, cfg: ExportConfig) -> None:
        super().__init__()
        self.half_precision = cfg.precision == "fp16"
        self.network = copy.deepcopy(network).half() if self.half_precision else network
        self.mean, self.std = mean, std
        self.preprocess, self.postprocess = cfg.preprocess, cfg.postprocess

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Images in, logits out; with `postprocess` probabilities and the class, int64 [N], too."""
        if self.preprocess:
            image = normalize(image, self.mean, self.std)
        logits = self.network(image.half()).float() if self.half_precision else self.network(image)
        if not self.postprocess:
            return logits
        return logits, logits.softmax(1), logits.argmax(1)


def convert(trained: TrainedModel, cfg: ExportConfig) -> ModelProto:
    """Write a checkpoint's network as an ONNX model, in float32 or float16.

    It takes any number of images, of any height and width where the network does.

    Raises:
        ValueError: The network cannot be written in `cfg.opset`.
    """
    data = trained.checkpoint.data
    module = Deployment(trained.module, data["mean"], data["std"], cfg).eval()
    dtype = torch.uint8 if cfg.preprocess else torch.float32
    inputs = [PIXELS if cfg.preprocess else IMAGE]
    outputs = [LOGITS, PROBABILITIES, CLASS] if cfg.postprocess else [LOGITS]
    axes = {name: {0: BATCH} for name in (*inputs, *outputs)}
    if takes_any_size(trained.kind):
        axes[inputs[0]] |= {2: HEIGHT, 3: WIDTH}
    model = export_onnx(
        module,
        (torch.zeros(2, 1, SIDE, SIDE, dtype=dtype),),
        exporter=cfg.exporter,
        layout=layout(cfg),  # type: ignore[arg-type]
        opset_version=cfg.opset,
        input_names=inputs,
        output_names=outputs,
        dynamic_axes=axes,
    )
    _describe(model, trained)
    return model


def layout(cfg: ExportConfig) -> str:
    """The layout that `cfg` stands for: int8 has no functions, as it is made of what is in them."""
    return cfg.layout or ("standard" if cfg.quantize else "function")


def _describe(model: ModelProto, trained: TrainedModel) -> None:
    """Say in the model what it, its inputs and outputs are, and nothing of how it was traced."""
    kind, data = trained.kind, trained.checkpoint.data
    texts = {
        IMAGE: f"pixels / 255, less {data['mean']:.6f}, divided by {data['std']:.6f}",
        PIXELS: "0 to 255, bright on black",
        LOGITS: f"one a class: {', '.join(data['classes'])}",
        PROBABILITIES: "softmax of the logits",
        CLASS: "index of the largest logit",
    }
    for value in (*model.graph.input, *model.graph.output):
        value.doc_string = texts[value.name]
    model.graph.name = kind.name
    model.doc_string = model.graph.doc_string = f"{describe_model(kind)} for {data['name']}"
    model.producer_name, model.producer_version = "lenet-ops", _version()
    for node in model.graph.node:
        node.doc_string = ""  # lines of the source
    onnx.helper.set_model_props(model, {})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lenet-ops")
    except PackageNotFoundError:  # run from the sources
        return ""


@functools.cache
def newest_opset() -> int:
    """The newest version of the standard operators that onnx and ONNX Runtime both support."""
    for version in range(onnx.defs.onnx_opset_version(), LEAST_OPSET, -1):
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        graph = helper.make_graph([], "empty", [value], [value])
        opset = helper.make_opsetid("", version)
        least_ir = helper.find_min_ir_version_for([opset])
        model = helper.make_model(graph, opset_imports=[opset], ir_version=least_ir)
        try:
            open_session(model.SerializeToString())
        except Exception:
            continue
        return version
    return LEAST_OPSET
