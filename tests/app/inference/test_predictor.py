import numpy as np
import pytest
import torch

from app.config.errors import UserError
from app.config.schema import DataConfig
from app.data.datasets import load_dataset, load_test_split
from app.data.transforms import normalize
from app.inference.predictor import (
    BATCH_SIZE,
    load_data,
    load_predictor,
    load_torch,
)
from app.runs.folder import read_summary
from tests.app.idx import random_images, write_dataset


def test_default_is_the_newest_run(make_run):
    folder = make_run()
    outputs = str(folder.parents[1])
    assert load_predictor(None, outputs).folder == folder
    assert load_torch(folder).folder == folder
    assert load_predictor(str(folder / "best.pt"), "elsewhere").folder == folder


@pytest.mark.parametrize("count", [0, 1, BATCH_SIZE, BATCH_SIZE + 1])
def test_logits_of_any_number_of_images(make_run, count):
    trained, images = load_torch(make_run()), random_images(count)
    data = trained.checkpoint.data
    with torch.no_grad():
        expected = trained.module(normalize(images, data.mean, data.std))
    logits = trained.logits(images)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_logits_on_a_gpu_equal_the_cpu(make_run):
    trained, images = load_torch(make_run("ncrelu", "depthwise")), random_images(7)
    expected = trained.logits(images)
    logits = load_torch(trained.folder, "cuda").logits(images)
    assert logits.device.type == "cpu"
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)  # TF32 may be on


def test_accuracy_matches_the_summary_of_training(trained_run, make_run, tmp_path):
    trained = load_torch(trained_run)
    split = load_test_split("digits", str(tmp_path))
    predicted = trained.logits(split.images).argmax(1)
    accuracy = (predicted == split.labels).double().mean().item()
    assert accuracy == pytest.approx(read_summary(trained_run)["test_accuracy"], abs=1e-9)


def test_data_split_matches_training(make_run):
    trained = load_torch(make_run(val_size=40, split_seed=3))
    val = load_data(trained.checkpoint, "data").val
    assert len(val) == 40
    trained.checkpoint.data.split_seed = 4
    assert not torch.equal(load_data(trained.checkpoint, "data").val.labels, val.labels)


def test_missing_data_set_raises_without_fallback(make_run, tmp_path, monkeypatch):
    from app.data import datasets as data

    def no_network(*_):
        raise data.DownloadError("no network")

    monkeypatch.setattr(data, "download", no_network)
    trained = load_torch(make_run(name="mnist"))
    for load in (
        lambda: load_test_split("mnist", str(tmp_path)),
        lambda: load_data(trained.checkpoint, str(tmp_path)),
    ):
        with pytest.raises(UserError, match=r"mnist is not in .*no network"):
            load()


def test_test_split_needs_no_training_files(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path)
    expected = load_dataset(DataConfig(root=str(tmp_path), val_size=1)).test
    for path in folder.glob("train-*"):
        path.write_bytes(b"damaged")
    split = load_test_split("mnist", str(tmp_path))
    assert torch.equal(split.images, expected.images)
    assert torch.equal(split.labels, expected.labels)
