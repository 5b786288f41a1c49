"""The report beside an exported model: what it is, how good, how fast, how to use it."""

import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto

from app.config.schema import ExportConfig
from app.export.graph import layout
from app.export.parity import Parity
from app.inference.onnx_runtime import CLASS, RUNTIME, open_session
from app.inference.predictor import TorchPredictor
from app.inference.preprocess import SIDE
from app.models import LEAST_SIDE, describe_model

LATENCY_BATCH, THROUGHPUT_BATCH = 1, 1024
BUDGET_S = 0.3  # for each measurement


def write_card(
    name: str, content: bytes, original: TorchPredictor, cfg: ExportConfig, parity: Parity
) -> str:
    """Write the report as Markdown.

    Args:
        name: Of the model's file.
        content: Of the model's file.
        original: What was exported.
        cfg: How.
        parity: How the two compare.
    """
    model = onnx.load_model_from_string(content)
    opset = ", ".join(f"{item.domain or 'ai.onnx'} {item.version}" for item in model.opset_import)
    latency, throughput = _speed(content)
    what = f"{describe_model(original.config)}, trained on {original.dataset}"
    facts = {
        "file": f"{len(content):,} bytes, IR version {model.ir_version}, opset {opset}",
        "export": f"exporter={cfg.exporter}, layout={layout(cfg)}",
        "numbers": cfg.quantize or cfg.precision,
        "input": "; ".join(map(_shown, model.graph.input)),
        "outputs": "<br>".join(map(_shown, model.graph.output)),
        "accuracy": f"{parity.accuracy:.2%} of {parity.images:,} test images "
        f"({parity.original_accuracy:.2%} in torch, float32)",
        "parity": f"{parity.differing:,} predictions differ from torch's; logits by "
        f"{parity.max_abs_difference:.2g} at most (the largest is {parity.largest_logit:.3g})",
        f"latency, batch {LATENCY_BATCH}": f"{1e6 * latency:,.0f} µs",
        f"throughput, batch {THROUGHPUT_BATCH}": f"{throughput:,.0f} images/s",
        "measured with": f"{RUNTIME}, {os.cpu_count()} CPUs "
        f"({platform.machine()}), one thread for the latency and all for the throughput",
    }
    nodes = Counter((node.domain or "ai.onnx", node.op_type) for node in model.graph.node)
    rows = [f"| {domain} | {op} | {count} |" for (domain, op), count in sorted(nodes.items())]
    functions = [
        f"`{function.name}`: {function.doc_string.strip()}  " for function in model.functions
    ]
    return "\n".join(
        [
            f"# {name}\n\n{what}.\n",
            "| | |\n| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items()),
            "\n## Nodes\n\n| domain | operator | nodes |\n| --- | --- | --- |",
            *rows,
            *(["\nOf our operators the file carries the meaning:\n", *functions] * bool(functions)),
            "\n## Use\n\nONNX Runtime and numpy are enough:\n\n```python",
            usage(name, cfg, original.any_size),
            "```\n",
        ]
    )


def usage(name: str, cfg: ExportConfig, any_size: bool = False) -> str:
    """Python that loads the model and runs it."""
    sizes = f"; from {LEAST_SIDE}x{LEAST_SIDE} on, any size" if any_size else ""
    lines = [
        "import json",
        "import numpy as np",
        "import onnxruntime",
        "",
        f'session = onnxruntime.InferenceSession("{name}")',
        "about = session.get_modelmeta().custom_metadata_map",
        f"pixels = np.zeros((1, 1, {SIDE}, {SIDE}), np.uint8)"
        f"  # 0 ... 255, bright ink on black{sizes}",
    ]
    input, value = "pixels", "pixels"
    if not cfg.preprocess:
        lines.append('image = (pixels / 255 - float(about["mean"])) / float(about["std"])')
        input, value = "image", "image.astype(np.float32)"
    if cfg.postprocess:
        lines.append(f'(index,) = session.run(["{CLASS}"], {{"{input}": {value}}})')
        lines.append('print(json.loads(about["classes"])[index[0]])')
    else:
        lines.append(f'(logits,) = session.run(["logits"], {{"{input}": {value}}})')
        lines.append('print(json.loads(about["classes"])[logits[0].argmax()])')
    return "\n".join(lines)


def _speed(content: bytes) -> tuple[float, float]:
    """Seconds for one image on one thread, and images a second in large batches on all."""
    times = {}
    for batch, threads in ((LATENCY_BATCH, 1), (THROUGHPUT_BATCH, 0)):
        session = open_session(content, threads=threads)
        (input,) = session.get_inputs()
        dtype: Any = np.uint8 if "uint8" in input.type else np.float32
        feed = {input.name: np.zeros((batch, 1, SIDE, SIDE), dtype)}
        times[batch] = _median_time(lambda s=session, f=feed: s.run(None, f))  # type: ignore[misc]
    return times[LATENCY_BATCH], THROUGHPUT_BATCH / times[THROUGHPUT_BATCH]


def _median_time(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _shown(value: ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    sizes = ", ".join(size.dim_param or str(size.dim_value) for size in tensor.shape.dim)
    kind = TensorProto.DataType.Name(tensor.elem_type).lower()
    return f"`{value.name}` {kind} [{sizes}]: {value.doc_string}"
