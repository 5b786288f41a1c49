"""The operators without optional packages."""

import subprocess
import sys
from importlib import import_module

import pytest


def without(*packages, code):
    """Run `code` in a Python that cannot import `packages`."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"
    return subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_export_error_names_the_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "ops.export", raising=False)
    with pytest.raises(ImportError) as raised:
        import_module("ops.export")
    expected = "ops.export needs onnx and onnxscript: pip install 'lenet-ops[onnx]'"
    assert str(raised.value) == expected


def test_operators_need_torch_only():
    packages = ("numpy", "onnx", "onnxruntime", "onnxscript", "torchvision", "hydra", "PIL")
    done = without(*packages, code="import ops, torch; ops.gelu(torch.ones(1))")
    assert done.returncode == 0, done.stderr
