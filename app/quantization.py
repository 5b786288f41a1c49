"""8-bit integers in place of float32, by ONNX Runtime's static quantization."""

import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto
from torch import Tensor

BATCH_SIZE = 500


def quantize(model: ModelProto, images: Tensor) -> ModelProto:
    """Quantize weights (one scale a channel) and activations, as QuantizeLinear/DequantizeLinear.

    Weights take 7 of the 8 bits: processors without VNNI add pairs of products of 8 bits in 16,
    which overflows (with all 8, a network lost 24 points of accuracy on such a one).

    Args:
        model: In float32 and standard operators.
        images: As the model takes them; the activations' ranges are measured on them.
    """
    from onnxruntime import quantization as ort

    name = model.graph.input[0].name
    original, model = model, onnx.ModelProto()  # ONNX Runtime moves its weights into a file
    model.CopyFrom(original)

    class Reader(ort.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(images.split(BATCH_SIZE))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch.numpy()}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        ort.quantize_static(
            model,
            path,
            Reader(),
            quant_format=ort.QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Gemm"],
            weight_type=ort.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )
        quantized = onnx.load(path)
    for field in ("ir_version", "producer_name", "producer_version", "doc_string"):
        setattr(quantized, field, getattr(original, field))
    onnx.helper.set_model_props(quantized, {})
    return quantized
