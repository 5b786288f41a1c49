"""Model card of an exported file: accuracy, parity, speed, nodes, usage."""

import os
import platform
import statistics
import time

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto

from app.config.schema import ExportConfig, ModelConfig, SeparableConfig
from app.export.graph import exporter, layouts
from app.export.parity import Parity
from app.inference.onnx_runtime import CLASS, IMAGE, LOGITS, PIXELS, RUNTIME, open_session
from app.inference.predictor import TorchPredictor
from app.inference.preprocess import SIDE
from app.models import MIN_SIDE, describe_model

BUDGET_S = 0.3  # for each measurement


def write_card(
    name: str, content: bytes, original: TorchPredictor, cfg: ExportConfig, parity: Parity
) -> str:
    """Return the model card of the exported file `name` as Markdown."""
    model = onnx.load_model_from_string(content)
    opset = ", ".join(f"{item.domain or 'ai.onnx'} {item.version}" for item in model.opset_import)
    latency = median_time(content, batch=1, threads=1)
    throughput = 1024 / median_time(content, batch=1024, threads=0)
    facts = {
        "file": f"{len(content):,} bytes, IR version {model.ir_version}, opset {opset}",
        "export": f"exporter={exporter(cfg)}, layout={layouts(cfg)[0]}",
        "runtimes": runtimes(original.config, cfg),
        "numbers": cfg.quantize or cfg.precision,
        "input": "; ".join(map(_signature, model.graph.input)),
        "outputs": "<br>".join(map(_signature, model.graph.output)),
        "accuracy": f"{parity.accuracy:.2%} of {parity.images:,} test images "
        f"({parity.original_accuracy:.2%} in torch, float32)",
        "parity": f"{parity.differing:,} predictions differ from torch's; logits by "
        f"{parity.max_abs_difference:.2g} at most (the largest is {parity.largest_logit:.3g})",
        "latency": f"{1e6 * latency:,.0f} µs for one image on one thread",
        "throughput": f"{throughput:,.0f} images/s in batches of 1024 on all threads",
        "measured with": f"{RUNTIME}, {os.cpu_count()} CPUs ({platform.machine()})",
    }
    functions = [f"`{item.name}`: {item.doc_string.strip()}  " for item in model.functions]
    lines = [
        f"# {name}\n\n{describe_model(original.config)}, trained on {original.data.name}.\n",
        "| | |\n| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts.items()),
    ]
    if functions:
        lines += ["\nCustom operators defined in this file:\n", *functions]
    lines += ["\n## Use\n\nIt takes ONNX Runtime and numpy:\n\n```python"]
    return "\n".join([*lines, usage(name, cfg, original.any_size), "```\n"])


def runtimes(network: ModelConfig, cfg: ExportConfig) -> str:
    """Return the runtimes that run the file, as in docs/runtimes.md."""
    names = ["ONNX Runtime", "onnxruntime-web"]
    if layouts(cfg)[0] == "function":
        return ", ".join([*names, "onnx's reference evaluator"]) + "; for others, layout=standard"
    has_gelu = isinstance(network, SeparableConfig) or getattr(network, "act", None) == "gelu"
    openvino = "OpenVINO (gelu: workaround in docs/runtimes.md)" if has_gelu else "OpenVINO"
    tract = [] if cfg.precision == "fp16" else ["tract"]  # refuses float16 in Gemm
    return ", ".join([*names, openvino, *tract])


def usage(name: str, cfg: ExportConfig, any_size: bool) -> str:
    """Return Python code that loads the model and runs it."""
    sizes = f"; any size from {MIN_SIDE}x{MIN_SIDE}" if any_size else ""
    image = '\nimage = (pixels / 255 - float(about["mean"])) / float(about["std"])'
    feed = f'{{"{IMAGE}": image.astype(np.float32)}}'
    if cfg.preprocess:
        image, feed = "", f'{{"{PIXELS}": pixels}}'
    output, index = (CLASS, "output[0]") if cfg.postprocess else (LOGITS, "output[0].argmax()")
    return f"""\
import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{name}")
about = session.get_modelmeta().custom_metadata_map
pixels = np.zeros((1, 1, {SIDE}, {SIDE}), np.uint8)  # 0 ... 255, bright ink on black{sizes}{image}
(output,) = session.run(["{output}"], {feed})
print(json.loads(about["classes"])[{index}])"""


def median_time(content: bytes, batch: int, threads: int) -> float:
    """Return the median time of a batch in ONNX Runtime in seconds; `threads` 0: all."""
    session = open_session(content, threads=threads)
    (input,) = session.get_inputs()
    dtype = np.uint8 if "uint8" in input.type else np.float32
    feed = {input.name: np.zeros((batch, 1, SIDE, SIDE), dtype)}
    session.run(None, feed)
    times: list[float] = []
    while sum(times) < BUDGET_S:
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _signature(value: ValueInfoProto) -> str:
    """Format name, type, shape and description of an input or output."""
    tensor = value.type.tensor_type
    sizes = ", ".join(size.dim_param or str(size.dim_value) for size in tensor.shape.dim)
    dtype = TensorProto.DataType.Name(tensor.elem_type).lower()
    return f"`{value.name}` {dtype} [{sizes}]: {value.doc_string}"
