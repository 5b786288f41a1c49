"""scripts/setup.sh: its choice of kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = """
class cuda:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: {count})
    get_device_capability = staticmethod({capabilities}.__getitem__)
"""


@pytest.fixture
def choose(tmp_path):
    """Return a function that calls choose_kernels with GPUs of given compute capabilities."""

    def call(*capabilities, available=True, **variables):
        available = available and bool(capabilities)
        fake = TORCH.format(available=available, count=len(capabilities), capabilities=capabilities)
        (tmp_path / "torch.py").write_text(fake)
        python = tmp_path / "python"
        python.unlink(missing_ok=True)
        python.symlink_to(sys.executable)
        kept = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
        script = "source scripts/setup.sh nothing; choose_kernels"
        return subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env={**kept, **variables},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    return call


def test_cpu_kernels_without_gpu(choose):
    assert choose() == "USE_CUDA=0"


def test_cpu_kernels_with_unusable_gpu(choose):
    assert choose((9, 0), available=False) == "USE_CUDA=0"


def test_architectures_of_visible_gpus(choose):
    assert choose((9, 0)) == "TORCH_CUDA_ARCH_LIST=9.0"
    assert choose((10, 0), (8, 6), (10, 0)) == "TORCH_CUDA_ARCH_LIST=8.6;10.0"


@pytest.mark.parametrize("name", ["USE_CUDA", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"])
@pytest.mark.parametrize("gpus", [(), ((9, 0),)])
def test_user_variables_override(choose, name, gpus):
    assert choose(*gpus, **{name: "1"}) == ""
