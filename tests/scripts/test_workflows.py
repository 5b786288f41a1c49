"""Workflows call scripts, which also run elsewhere."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# Steps that need GitHub.
ALLOWED = ("gh release create ", "test -f ")


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_steps_call_scripts(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    lines = [
        line
        for job in jobs
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
        if not line.startswith(ALLOWED)
    ]
    assert lines
    for line in lines:
        (script,) = re.findall(r"(?:scripts|\.ci)/[\w.]+", line)
        assert (ROOT / script).stat().st_mode & 0o111, script
