"""The operators without optional packages."""

import subprocess
import sys

import pytest


def without(*packages, code):
    """Run `code` in a Python that cannot import `packages`."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"
    return subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_export_error_names_the_extra(missing):
    failed = without(missing, code="import ops.export")
    *_, line = failed.stderr.splitlines()
    assert line == (
        "ImportError: ops.export needs onnx and onnxscript: pip install 'lenet-ops[onnx]'"
    )


def test_operators_need_torch_only():
    packages = ("numpy", "onnx", "onnxruntime", "onnxscript", "torchvision", "hydra", "PIL")
    done = without(*packages, code="import ops, torch; ops.gelu(torch.ones(1))")
    assert done.returncode == 0, done.stderr
