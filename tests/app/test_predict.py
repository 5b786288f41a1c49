import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from app.config import PredictConfig
from app.data import Split
from app.errors import UserError
from app.inference import load_test_split, load_trained
from app.prediction import (
    Predictions,
    describe,
    draw,
    format_confusion,
    predict,
    print_pictures,
    to_csv,
)


def picture(path, text, size=100):
    image = Image.new("RGB", (160, 200), "white")
    ImageDraw.Draw(image).text((50, 40), text, "black", ImageFont.load_default(size))
    image.save(path)


@pytest.fixture
def cfg(trained_run, tmp_path):
    """The trained run's folder is shared: what is written goes beside a copy of its checkpoint."""
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    return PredictConfig(checkpoint=str(tmp_path / "best.pt"), device="cpu")


@pytest.fixture
def predictions():
    """Six images of three classes: two mistakes, the last the surer one."""
    labels, predicted = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 2, 2, 0])
    confidence = torch.tensor([0.9, 0.5, 0.7, 0.6, 1.0, 0.8])
    return Predictions(["cat", "a long name", "dog"], labels, predicted, confidence)


def test_confusion_and_mistakes(predictions):
    assert predictions.mistakes.tolist() == [False, False, False, True, False, True]
    assert predictions.confusion.tolist() == [[2, 0, 0], [0, 1, 1], [1, 0, 1]]
    assert describe(predictions, "pets") == "pets test: 66.67% of 6 images right, 2 wrong"
    assert format_confusion(predictions).splitlines() == [
        "is             cat  a long n       dog  <- predicted",
        "cat              2         .         .",
        "a long n         .         1         1",
        "dog              1         .         1",
    ]


def test_csv(predictions):
    rows = list(csv.reader(to_csv(predictions).splitlines()))
    assert rows[0] == ["index", "label", "predicted", "probability"]
    assert rows[4] == ["3", "a long name", "dog", "0.600000"]
    assert len(rows) == 7


def test_the_picture_shows_mistakes_first(predictions, monkeypatch):
    shown = []

    def draw_grid(title, tiles):
        shown.extend(tiles)
        return Image.new("L", (1, 1))

    monkeypatch.setattr("app.prediction.draw_grid", draw_grid)
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    draw(predictions, Split(images, predictions.labels), "pets")
    assert [tile.image.item() for tile in shown] == [5, 3, 1, 2, 0, 4]
    assert [tile.truth for tile in shown] == ["dog", "a long name", None, None, None, None]
    assert shown[0].caption == "cat (80%)"


def test_the_test_split(cfg, tmp_path, capsys):
    predict(cfg)
    output = capsys.readouterr().out
    trained = load_trained(cfg.checkpoint, "")
    accuracy = trained.checkpoint.metrics["test_accuracy"]
    assert accuracy > 0.8
    assert output.startswith(f"digits test: {accuracy:.2%} of 359 images right, ")
    for name in ("predictions.csv", "predictions.png"):
        assert f"wrote {tmp_path / name}\n" in output
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    split = load_test_split(trained.checkpoint, "")
    assert [int(row["label"]) for row in rows] == split.labels.tolist()
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert right / len(rows) == pytest.approx(accuracy)
    with Image.open(tmp_path / "predictions.png") as grid:
        assert grid.width > 500
        assert len(np.unique(np.asarray(grid).reshape(-1, 3), axis=0)) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.pt",
        "predictions.csv",
        "predictions.png",
    ]


def test_a_data_set_used_instead_is_named(make_run, capsys):
    predict(PredictConfig(checkpoint=str(make_run(fallback_from="mnist")), device="cpu"))
    assert capsys.readouterr().out.startswith("digits (instead of mnist) test: ")


def test_a_perfect_model_has_a_picture_too(cfg, predictions):
    right = replace(predictions, predicted=predictions.labels)
    split = Split(torch.zeros(6, 1, 28, 28, dtype=torch.uint8), predictions.labels)
    assert draw(right, split, "pets").startswith(b"\x89PNG")


def test_pictures(cfg, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for text in "0147":
        picture(folder / f"{text}.png", text)
    predict(replace(cfg, input=str(folder)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [str(folder / f"{text}.png") for text in "0147"]
    assert sum(line[1] in line[0].rpartition("/")[2] for line in lines) >= 3
    assert all(0 < float(line[2].rstrip("%")) <= 100 for line in lines)
    assert not (tmp_path / "predictions.csv").exists()


def test_print_pictures(capsys, tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "longer.png"]
    print_pictures(paths, torch.tensor([1, 0]), torch.tensor([0.5, 0.987654]), ["no", "yes"])
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/a.png       yes   50.00%",
        f"{tmp_path}/longer.png  no   98.77%",
    ]


def test_invert_reaches_the_pictures(cfg, tmp_path, capsys):
    picture(tmp_path / "1.png", "1")
    predict(replace(cfg, input=str(tmp_path / "1.png"), invert=True))
    detected = capsys.readouterr().out
    predict(replace(cfg, input=str(tmp_path / "1.png")))
    assert capsys.readouterr().out == detected
    with pytest.raises(UserError, match="blank"):
        predict(replace(cfg, input=str(tmp_path / "1.png"), invert=False))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input": "note.txt"}, "input={}/note.txt: not a picture, or of a format unknown here"),
        ({"input": "missing.png"}, "input={}/missing.png: no such file or folder"),
        ({"input": "empty"}, "input={}/empty: no picture in this folder"),
        ({"input": "blank.png"}, "input={}/blank.png: a blank picture, there is no digit in it"),
        ({"checkpoint": "note.txt"}, "checkpoint={}/note.txt: damaged, or not a checkpoint"),
        ({"checkpoint": "missing.pt"}, "checkpoint={}/missing.pt: no such file"),
        ({"checkpoint": "half.pt"}, "checkpoint={}/half.pt: damaged, or not a checkpoint"),
        ({"checkpoint": None, "outputs": "empty"}, "no run under {}/empty"),
    ],
)
def test_wrong_usage(cfg, tmp_path, capsys, changes, says):
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.pt").write_bytes((tmp_path / "best.pt").read_bytes()[:20000])
    Image.new("L", (50, 50), 255).save(tmp_path / "blank.png")
    before = sorted(tmp_path.rglob("*"))
    changes = {key: value and str(tmp_path / value) for key, value in changes.items()}
    with pytest.raises(UserError) as raised:
        predict(replace(cfg, **changes))
    assert str(raised.value).startswith(says.format(tmp_path))
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command(command, trained_run, tmp_path):
    name = tmp_path / "IMG (1).png"
    picture(name, "7")
    where = f"outputs={trained_run.parents[1]}"
    done = command("app.predict", where, f"input={name}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{name}  ")
    wrong = command("app.predict", where, "input=nothing.png")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: input=nothing.png: no such file or folder\n"
    assert list((tmp_path / "here").iterdir()) == []
