"""CPU kernels for older instruction sets, selected by ATEN_CPU_CAPABILITY in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LEVELS = ("DEFAULT", "AVX2", "AVX512")
TESTS = (
    "tests/ops/test_values.py::test_many_elements",
    "tests/ops/test_depthwise_conv1d.py::test_every_filter",
    "tests/ops/test_depthwise_conv2d.py::test_every_filter",
    "tests/ops/test_ncrelu.py::test_rows_of_any_length",
)
SELECTED = "(float32 or bfloat16) and not cuda and not 130 and not 450"


@pytest.mark.parametrize("level", [pytest.param("DEFAULT", marks=pytest.mark.exhaustive), "AVX2"])
def test_older_instruction_set(level):
    best = torch.backends.cpu.get_cpu_capability()
    if best not in LEVELS[LEVELS.index(level) + 1 :]:
        pytest.skip(f"this processor has {best}: the other tests cover {level}, or it lacks it")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", SELECTED, *TESTS],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ATEN_CPU_CAPABILITY": level.lower()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
