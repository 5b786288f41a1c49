"""scripts/bench_geometry.py: arguments."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_geometry.py"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--only 999 --least 0.9", "--only takes indices from 0 to 299 (below --count)"),
        ("--only -1", "--only takes indices from 0 to 299 (below --count)"),
        ("--count 0", "--count must be at least 1"),
    ],
)
def test_selection_without_geometries_is_refused(arguments, line):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: {line}\n")
