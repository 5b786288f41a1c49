"""ONNX export of networks that use the operators."""

try:
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ops.export needs onnx and onnxscript: pip install 'lenet-ops[onnx]'", name=error.name
    ) from error

from ops.core.registration import decompositions
from ops.export.model import DEFAULT_OPSET, LEAST_OPSET, Layout, export_onnx
from ops.export.operators import DOMAIN, VERSION, register_symbolics, translation_table

__all__ = [
    "DEFAULT_OPSET",
    "DOMAIN",
    "LEAST_OPSET",
    "VERSION",
    "Layout",
    "decompositions",
    "export_onnx",
    "register_symbolics",
    "translation_table",
]
