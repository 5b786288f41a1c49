import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import app.runs
from app.config import ModelConfig, TrainConfig
from app.errors import UserError
from app.runs import create_run_folder


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path):
    cfg = TrainConfig(outputs=str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(create_run_folder, [cfg] * 40))
    assert len(set(folders)) == 40
    for folder in folders:
        name = folder.relative_to(tmp_path).as_posix()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{8}", name)


def test_a_name_that_is_taken_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(app.runs, "run_name", lambda: "2026-01-31/12-00-00-same")
    cfg = TrainConfig(outputs=str(tmp_path))
    create_run_folder(cfg)
    with pytest.raises(UserError, match="cannot be written: File exists"):
        create_run_folder(cfg)


def test_the_configuration_is_in_the_folder(tmp_path):
    cfg = TrainConfig(model=ModelConfig(act="gelu"), outputs=str(tmp_path), seed=5)
    saved = OmegaConf.load(create_run_folder(cfg) / ".hydra" / "config.yaml")
    assert OmegaConf.merge(OmegaConf.structured(TrainConfig), saved) == OmegaConf.structured(cfg)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for outputs in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(UserError, match=r"outputs=.*: cannot be written: "):
            create_run_folder(TrainConfig(outputs=str(outputs)))
