from pathlib import Path

import pytest

from app.runs.sweep import Sweep


@pytest.mark.parametrize("outputs", [".", "outputs"])
def test_a_sweep_without_runs_leaves_nothing(tmp_path, outputs):
    sweep = Sweep()
    with sweep:
        folder = Path(sweep.folder(str(tmp_path / outputs)))
        assert str(folder) == sweep.folder(str(tmp_path / outputs))  # the same at every question
        folder.mkdir(parents=True)
        (folder / "multirun.yaml").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_with_runs_stays(tmp_path):
    sweep = Sweep()
    with sweep:
        run = Path(sweep.folder(str(tmp_path))) / "0"
        run.mkdir(parents=True)
        (run.parent / "multirun.yaml").touch()
    assert {path.name for path in run.parent.iterdir()} == {"0", "multirun.yaml"}
