"""Quantisation to int8 by ONNX Runtime."""

import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor

from app.export.compact import compact
from app.inference.onnx_runtime import BATCH_SIZE


def quantize(model: ModelProto, images: Tensor) -> ModelProto:
    """Quantize weights (per channel) and activations with QuantizeLinear and DequantizeLinear.

    `images` calibrate the activations. Convolutions and fully connected layers have 7-bit weights:
    processors without VNNI add pairs of 8-bit products in 16 bits, which overflows. Other layers
    store int8 weights and compute in float32.
    """
    from onnxruntime import quantization as ort

    name = model.graph.input[0].name
    original, model = model, ModelProto()  # quantize_static empties its argument
    model.CopyFrom(original)

    # The calibrator stacks the results of batches, so their sizes must be equal.
    size = min(BATCH_SIZE, len(images))
    batches = images[: len(images) // size * size].split(size)
    feeds = ({name: batch.numpy()} for batch in batches)

    class Reader(ort.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path = Path(folder) / "model.onnx"
        ort.quantize_static(
            model,
            path,
            Reader(),
            quant_format=ort.QuantFormat.QDQ,
            # Clips one value in 100,000; otherwise outliers would coarsen the scale.
            calibrate_method=ort.CalibrationMethod.Percentile,
            op_types_to_quantize=["Conv", "Gemm"],
            # From opset 21 on, ONNX Runtime on x86 sometimes converts int8 to uint8 wrongly.
            activation_type=ort.QuantType.QUInt8,
            weight_type=ort.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            extra_options={"QuantizeBias": False},  # smaller file; quantized at loading
        )
        quantized = onnx.load(path)
    store_weights_as_int8(quantized.graph)
    compact(quantized.graph)
    for field in ("ir_version", "producer_name", "producer_version", "doc_string"):
        setattr(quantized, field, getattr(original, field))
    helper.set_model_props(quantized, {item.key: item.value for item in original.metadata_props})
    return quantized


def store_weights_as_int8(graph: GraphProto) -> None:
    """Store the remaining float32 weights as int8, with a scale per row."""
    for weights in list(graph.initializer):
        if weights.data_type != TensorProto.FLOAT or len(weights.dims) < 2:
            continue
        name, values = weights.name, numpy_helper.to_array(weights)
        largest = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        integers = np.rint(values / scale).astype(np.int8)
        weights.CopyFrom(numpy_helper.from_array(integers, f"{name}_quantized"))
        graph.initializer.append(numpy_helper.from_array(scale.ravel(), f"{name}_scale"))
        inputs = [f"{name}_quantized", f"{name}_scale"]
        graph.node.insert(0, helper.make_node("DequantizeLinear", inputs, [name], axis=0))
