"""scripts/bench_geometry.py: arguments."""

import runpy
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
def test_selection_without_geometries_is_refused(monkeypatch, capsys, arguments, line):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # else the script sets it for later tests
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    output, errors = capsys.readouterr()
    assert (end.value.code, output) == (2, "")
    assert errors.endswith(f"error: {line}\n")
