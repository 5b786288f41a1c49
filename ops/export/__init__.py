"""ONNX export of networks that use the operators."""

from ops.export.model import DEFAULT_OPSET, LEAST_OPSET, export_onnx
from ops.export.operators import DOMAIN, VERSION, register_symbolics, translation_table

__all__ = [
    "DEFAULT_OPSET",
    "DOMAIN",
    "LEAST_OPSET",
    "VERSION",
    "export_onnx",
    "register_symbolics",
    "translation_table",
]
