import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import app.runs.folder
import app.training.state
from app.config.errors import UserError
from app.config.schema import DataConfig, LeNetConfig, OptimConfig, TrainConfig, from_mapping
from app.runs.folder import (
    RESULTS,
    SUMMARY,
    create_run_folder,
    find_checkpoint,
    read_settings,
)
from app.training.state import load_config


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path):
    cfg = TrainConfig(outputs=str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(create_run_folder, [cfg] * 40))
    assert len(set(folders)) == 40
    for folder in folders:
        name = folder.relative_to(tmp_path).as_posix()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{8}", name)


def test_a_name_that_is_taken_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(app.runs.folder, "run_name", lambda: "2026-01-31/12-00-00-same")
    cfg = TrainConfig(outputs=str(tmp_path))
    create_run_folder(cfg)
    with pytest.raises(UserError, match="cannot be written: File exists"):
        create_run_folder(cfg)


def test_a_new_run_removes_no_folder_of_others(tmp_path):
    """`outputs` may be a folder that holds other things, the home folder for one."""
    for name in ("projects/.thesis.tmp", "projects/thesis/.draft.tmp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "chapter").touch()
        os.utime(tmp_path / name, (1e9, 1e9))
    before = set(tmp_path.rglob("*"))
    create_run_folder(TrainConfig(outputs=str(tmp_path)))
    assert before < set(tmp_path.rglob("*"))


def test_the_configuration_is_in_the_folder(tmp_path):
    cfg = TrainConfig(model=LeNetConfig(act="gelu"), outputs=str(tmp_path), seed=5)
    assert from_mapping(TrainConfig, read_settings(create_run_folder(cfg))) == cfg


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for outputs in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(UserError, match=r"outputs=.*: cannot be written: "):
            create_run_folder(TrainConfig(outputs=str(outputs)))


def test_an_option_of_a_group_that_another_run_has_not(tmp_path, monkeypatch):
    cfg = TrainConfig(
        model=LeNetConfig(conv="depthwise"),
        data=DataConfig(name="digits"),
        optim=OptimConfig("adamw"),
        outputs=str(tmp_path),
    )
    folder = create_run_folder(cfg)

    def resumed(option, asked):
        typed = {option.partition("=")[0]: option}
        monkeypatch.setattr(app.training.state, "typed_overrides", lambda: typed)
        return load_config(folder, asked, None)

    for option, key in {
        "data=mnist": "data.name=digits",
        "model=lenet": "model.conv=depthwise",
        "optim=muon": "optim.name=adamw",
        "optim.name=muon": "optim.name=adamw",
    }.items():
        with pytest.raises(UserError, match=f"^{option}: the run to resume has {key}; leave it"):
            resumed(option, TrainConfig())
    assert resumed("model=lenet_depthwise", TrainConfig(model=cfg.model)).optim == cfg.optim


def test_find_checkpoint_takes_the_newest(tmp_path, capsys):
    with pytest.raises(UserError, match=r"no run under .* has a best.pt: train one with `python -"):
        find_checkpoint(tmp_path)
    for age, name in enumerate(["a/new", "sweep/1", "sweep/0", "b/old"]):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "best.pt").touch()
        os.utime(folder / "best.pt", (1e9 - age, 1e9 - age))
    assert find_checkpoint(tmp_path) == tmp_path / "a" / "new" / "best.pt"
    assert capsys.readouterr().err == ""  # nothing is known of it


def test_find_checkpoint_says_what_it_takes(tmp_path, capsys):
    cfg = TrainConfig(outputs=str(tmp_path))
    run = create_run_folder(cfg)
    with pytest.raises(UserError, match=r"no run under .* has a best.pt"):
        find_checkpoint(tmp_path)
    best = run / "best.pt"
    best.touch()

    def told():
        assert find_checkpoint(tmp_path) == best
        return capsys.readouterr().err

    assert told() == f"using {best} (unfinished)\n"
    for status in ("interrupted", "failed"):
        (run / SUMMARY).write_text(json.dumps({"status": status}))
        assert told() == f"using {best} ({status})\n"
    finished = {"status": "finished"} | dict.fromkeys(RESULTS, 1)
    (run / SUMMARY).write_text(json.dumps(finished))
    assert told() == ""
    newer = create_run_folder(cfg)
    os.utime(best, (1e9, 1e9))
    assert told() == f"using {best} (finished): {newer} (unfinished) has no best.pt\n"
