"""The `data.root` of a run, which later commands use, too."""

from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from app.config.errors import UserError
from app.config.schema import DataConfig, DataRoot, ExportConfig, PredictConfig, TrainConfig
from app.export.export import export
from app.inference.output import predict
from app.runs.folder import CONFIG
from tests.app.idx import write_dataset


@pytest.fixture
def run(make_run, tmp_path):
    """Return the folder of a run on the MNIST in tmp_path / "own"."""
    folder, own = make_run(name="mnist"), tmp_path / "own"
    write_dataset(own)
    (folder / CONFIG).parent.mkdir()
    settings = asdict(TrainConfig(data=DataConfig(root=str(own))))
    (folder / CONFIG).write_text(OmegaConf.to_yaml(settings))
    return folder


@pytest.mark.usefixtures("short_latency_benchmark")
def test_predict_and_export_use_the_data_root_of_the_run(run, capsys):
    export(ExportConfig(checkpoint=str(run), quantize="int8"))
    predict(PredictConfig(checkpoint=str(run), device="cpu"))
    assert " of 100 images right" in capsys.readouterr().out


def test_typed_data_root_comes_first(run, tmp_path):
    root = tmp_path / "file"
    root.touch()
    cfg = PredictConfig(checkpoint=str(run), device="cpu", data=DataRoot(str(root)))
    with pytest.raises(UserError, match=f"^data.root={root}: "):
        predict(cfg)
