"""Settings and summary of a resumed run."""

import json
from dataclasses import replace

import pytest

from app.config.errors import UserError
from app.config.schema import DataConfig, SeparableConfig, TrainConfig, TrainerConfig
from app.runs.folder import create_run_folder
from app.training.state import load_config
from app.training.trainer import train
from tests.app.idx import write_dataset


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], "saved"),
        (["data=mnist"], "saved"),  # the option's data.root was not typed
        (["data.root=other"], "other"),
        (["data=mnist", "data.root=other"], "other"),
    ],
)
def test_resumed_run_keeps_its_data_root(tmp_path, typed, expected):
    for name in ("saved", "other"):
        (tmp_path / name).mkdir()
    saved, other = (DataConfig(root=str(tmp_path / name)) for name in ("saved", "other"))
    folder = create_run_folder(TrainConfig(data=saved, outputs=str(tmp_path)))
    by_key = {override.partition("=")[0]: override for override in typed}
    asked = TrainConfig(data=other, outputs=str(tmp_path))
    assert load_config(folder, asked, None, by_key).data.root == str(tmp_path / expected)


def test_resumed_run_whose_data_root_is_gone_takes_the_default(tmp_path):
    gone = DataConfig(root=str(tmp_path / "gone"))
    folder = create_run_folder(TrainConfig(data=gone, outputs=str(tmp_path)))
    assert load_config(folder, TrainConfig(), None, {}).data.root == "data"


def test_resuming_another_network_raises(tmp_path):
    run = TrainConfig(model=SeparableConfig([[4], [4], [4]]), outputs=str(tmp_path))
    folder = create_run_folder(run)
    with pytest.raises(
        UserError, match=r"^model=lenet: the run to resume has model\.name=separable"
    ):
        load_config(folder, TrainConfig(), None, {"model": "model=lenet"})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("resume", ["latest", "folder"])
def test_resume_writes_a_damaged_summary_anew(tmp_path, capsys, resume):
    write_dataset(tmp_path / "data")
    data = DataConfig(root=str(tmp_path / "data"), val_size=60)
    trainer = TrainerConfig(epochs=1, batch_size=32)
    cfg = TrainConfig(data=data, trainer=trainer, device="cpu", outputs=str(tmp_path / "outputs"))
    summary = train(cfg)
    (file,) = tmp_path.rglob("summary.json")
    file.write_text('{"status": ')
    capsys.readouterr()
    train(replace(cfg, resume=resume if resume == "latest" else str(file.parent)))
    assert f"WARNING: {file}: cannot be read: " in capsys.readouterr().err
    written = json.loads(file.read_text())
    assert {**written, "seconds": 0} == {**summary, "seconds": 0}
