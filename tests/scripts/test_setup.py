"""scripts/setup.sh: which kernels it builds."""

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
    """Call choose_kernels beside a torch that sees GPUs of these compute capabilities."""

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


def test_without_a_gpu_cpu_kernels_only(choose):
    assert choose() == "USE_CUDA=0"


def test_unusable_gpus_do_not_count(choose):
    assert choose((9, 0), available=False) == "USE_CUDA=0"


def test_visible_architectures_only(choose):
    assert choose((9, 0)) == "TORCH_CUDA_ARCH_LIST=9.0"
    assert choose((10, 0), (8, 6), (10, 0)) == "TORCH_CUDA_ARCH_LIST=8.6;10.0"


@pytest.mark.parametrize("name", ["USE_CUDA", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"])
@pytest.mark.parametrize("gpus", [(), ((9, 0),)])
def test_the_users_choice_wins(choose, name, gpus):
    assert choose(*gpus, **{name: "1"}) == ""
