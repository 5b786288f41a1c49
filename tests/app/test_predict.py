import csv
import io
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from app.config.errors import RunError, UserError
from app.config.schema import ExportConfig, PredictConfig
from app.data.datasets import load_test_split
from app.export.export import export
from app.inference.image_io import list_pictures
from app.inference.output import predict
from app.inference.predictor import load_torch
from app.runs.folder import read_summary


def picture(path, text, size=100):
    image = Image.new("RGB", (160, 200), "white")
    ImageDraw.Draw(image).text((50, 40), text, "black", ImageFont.load_default(size))
    image.save(path)


@pytest.fixture
def cfg(trained_run, tmp_path):
    """Return a configuration with a copy of the shared checkpoint."""
    (tmp_path / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    return PredictConfig(checkpoint=str(tmp_path / "best.pt"), device="cpu")


def test_test_set_predictions_are_written_as_csv_and_png(cfg, trained_run, tmp_path, capsys):
    predict(cfg)
    output = capsys.readouterr().out
    accuracy = read_summary(trained_run)["test_accuracy"]
    assert accuracy > 0.8
    assert output.startswith(f"digits test: {accuracy:.2%} of 359 images right, ")
    for name in ("predictions.csv", "predictions.png"):
        assert f"wrote {tmp_path / name}\n" in output
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    split = load_test_split("digits", "data")
    assert [int(row["label"]) for row in rows] == split.labels.tolist()
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert right / len(rows) == pytest.approx(accuracy)
    with Image.open(tmp_path / "predictions.png") as grid:
        assert grid.width > 500
        assert len(np.unique(np.asarray(grid.convert("RGB")).reshape(-1, 3), axis=0)) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.pt",
        "predictions.csv",
        "predictions.png",
    ]


def test_fallback_data_set_is_printed(make_run, capsys):
    predict(PredictConfig(checkpoint=str(make_run(fallback_from="mnist")), device="cpu"))
    assert capsys.readouterr().out.startswith("digits (instead of mnist) test: ")


def test_unwritable_run_folder_raises_after_the_table(cfg, tmp_path, capsys):
    (tmp_path / "predictions.png").mkdir()
    with pytest.raises(RunError) as raised:
        predict(cfg)
    output, errors = capsys.readouterr()
    assert output.startswith("digits test: ")
    assert output.endswith(f"\n\nwrote {tmp_path}/predictions.csv\n")
    assert errors == ""
    assert str(raised.value) == f"{tmp_path}/predictions.png: cannot be written: Is a directory"


def test_read_only_run_folder_is_unusable_input(cfg, tmp_path, capsys, unwritable):
    with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: Permission denied$"):
        predict(cfg)
    assert capsys.readouterr().out.startswith("digits test: ")


def test_folder_of_pictures(cfg, tmp_path, capsys):
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


def test_pictures_that_cannot_be_predicted_are_skipped(cfg, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    picture(folder / "7.png", "7")
    Image.new("L", (50, 50), 255).save(folder / "blank.png")
    (folder / "half.png").write_bytes((folder / "7.png").read_bytes()[:60])
    (folder / "lost.png").symlink_to("nowhere")
    with pytest.raises(UserError) as raised:
        predict(replace(cfg, input=str(folder), format="csv"))
    assert str(raised.value) == f"input={folder}: skipped 3 of 4 pictures"
    output, errors = capsys.readouterr()
    assert output.splitlines()[1].startswith(f"{folder}/7.png,7,")
    assert output.count("\n") == 2
    blank, half, lost = errors.splitlines()
    assert blank.startswith(f"skipped: input={folder}/blank.png: a blank picture")
    assert half.startswith(f"skipped: input={folder}/half.png: cannot be read")
    assert lost == f"skipped: input={folder}/lost.png: no such picture"


@pytest.mark.usefixtures("short_latency_benchmark")
def test_torch_and_onnx_print_the_same(cfg, tmp_path, capsys):
    export(ExportConfig(checkpoint=str(tmp_path), layout="function"))
    folder = tmp_path / "pictures"
    folder.mkdir()
    for text in "0147":
        picture(folder / f"{text}.png", text)
    for changes in ({"input": str(folder)}, {}, {"format": "json"}):
        printed = []
        for runtime in ("onnx", "torch"):
            capsys.readouterr()
            predict(replace(cfg, checkpoint=str(tmp_path), runtime=runtime, **changes))
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1] != ""


def test_csv_and_json_print_only_data_to_stdout(cfg, tmp_path, capsys):
    predict(replace(cfg, format="json"))
    output = capsys.readouterr()
    assert json.loads(output.out)["images"] == 359
    assert f"wrote {tmp_path / 'predictions.csv'}" in output.err
    predict(replace(cfg, format="csv"))
    assert capsys.readouterr().out == (tmp_path / "predictions.csv").read_text()


def test_standard_input_is_a_picture(cfg, tmp_path, capsys, monkeypatch):
    picture(tmp_path / "1.png", "1")
    gray = np.asarray(Image.open(tmp_path / "1.png").convert("L"))
    plain = f"P2\n{gray.shape[1]} {gray.shape[0]}\n255\n" + "\n".join(map(str, gray.ravel()))
    for content in ((tmp_path / "1.png").read_bytes(), plain.encode()):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        predict(replace(cfg, input="-", format="csv"))
        (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
        assert (row["file"], row["predicted"]) == ("-", "1")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x89PNG\r\n\x1a\n\0 half", "input=- (standard input): not a picture, or of an unknown"),
        (b"", "input=-: standard input is empty"),
        (b" \n", "input=-: standard input is empty"),
        (None, "input=-: standard input is empty"),  # closed
        (b"BM.png", "input=BM.png: no such picture"),
        (b"no.png\n\xe9.png\n", "input=-: skipped 2 of 2 pictures"),
    ],
)
def test_unusable_standard_input_raises(cfg, monkeypatch, content, says):
    stdin = None if content is None else io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(UserError) as raised:
        predict(replace(cfg, input="-"))
    assert str(raised.value).startswith(says)


def test_standard_input_has_names(cfg, tmp_path, capsys, monkeypatch):
    for name in (b"1.png", b"caf\xe9.png"):
        picture(tmp_path / os.fsdecode(name), "1")
    names = [os.fsencode(tmp_path) + name for name in (b"/missing.png", b"/caf\xe9.png", b"/1.png")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n".join([*names, b""]))))
    assert [os.fsencode(name) for name, _ in list_pictures("-")] == names
    names = [names[0], b"a" * 300, b"", names[2]]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(names))))
    with pytest.raises(UserError, match="skipped 2 of 3 pictures"):
        predict(replace(cfg, input="-", format="csv"))
    printed = capsys.readouterr()
    (row,) = csv.DictReader(printed.out.splitlines())
    assert row["file"] == f"{tmp_path}/1.png"
    missing, long = printed.err.splitlines()
    assert missing == f"skipped: input={tmp_path}/missing.png: no such picture"
    assert long == f"skipped: input={'a' * 300}: cannot be read (File name too long)"


def test_control_characters_in_names_do_not_break_the_table(cfg, tmp_path, capsys):
    picture(tmp_path / "a\nb.png", "1")
    picture(tmp_path / "c.png", "1")
    predict(replace(cfg, input=f"{tmp_path}/*.png"))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/a\\nb.png  ")
    assert second.startswith(f"{tmp_path}/c.png     ")


def test_too_large_picture_names_the_limit(cfg, tmp_path):
    Image.new("1", (20_000, 10_000)).save(tmp_path / "1.png")
    with pytest.raises(UserError) as raised:
        predict(replace(cfg, input=str(tmp_path / "1.png")))
    assert str(raised.value) == f"input={tmp_path}/1.png: too large, at most 178,956,970 pixels"


def test_invert_is_applied(cfg, tmp_path, capsys):
    picture(tmp_path / "1.png", "1")
    predict(replace(cfg, input=str(tmp_path / "1.png"), invert=True))
    detected = capsys.readouterr().out
    predict(replace(cfg, input=str(tmp_path / "1.png")))
    assert capsys.readouterr().out == detected
    with pytest.raises(UserError, match="no digit found with invert=false, leave out invert=false"):
        predict(replace(cfg, input=str(tmp_path / "1.png"), invert=False))


def test_unframed_pictures_keep_their_size(make_run, tmp_path, capsys):
    folder = make_run(head="gap")
    export(ExportConfig(checkpoint=str(folder), layout="function"))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    images = load_test_split("digits", "data").images[:2, 0].numpy()
    Image.fromarray(images[0]).save(pictures / "a.png")
    Image.fromarray(255 - images[0]).save(pictures / "dark on light.png")
    Image.fromarray(np.pad(images[1], ((3, 9), (20, 41)))).save(pictures / "wide.png")
    cfg = PredictConfig(checkpoint=str(folder), device="cpu", format="json", frame=False)
    expected = load_torch(folder).logits
    capsys.readouterr()
    for runtime in ("torch", "onnx"):
        predict(replace(cfg, runtime=runtime, input=str(pictures)))
        rows = json.loads(capsys.readouterr().out)
        assert [row["file"] for row in rows] == sorted(map(str, pictures.iterdir()))
        padded = np.pad(images[1], ((3, 9), (20, 41)))
        for row, image in zip(rows, (images[0], images[0], padded), strict=True):
            probabilities = expected(torch.from_numpy(image)[None, None]).softmax(1)[0].tolist()
            assert list(row["probabilities"].values()) == pytest.approx(probabilities, abs=2e-6)


@pytest.mark.parametrize(
    ("head", "size", "says"),
    [
        ("gap", (40, 11), "40x11 pixels; with frame=false this network takes at least 12x12"),
        ("fc", (28, 30), "28x30 pixels; with frame=false this network takes 28x28"),
    ],
)
def test_unframed_picture_of_wrong_size_raises(make_run, tmp_path, head, size, says):
    file = tmp_path / "a.png"
    image = Image.new("L", size)
    image.paste(255, (4, 1, 7, 10))
    image.save(file)
    cfg = PredictConfig(checkpoint=str(make_run(head=head)), device="cpu", input=str(file))
    with pytest.raises(UserError) as raised:
        predict(replace(cfg, frame=False))
    assert str(raised.value) == f"input={file}: {says}"
    predict(cfg)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input": "note.txt"}, "input={}/note.txt: not a picture, or of an unknown format"),
        ({"input": "missing.png"}, "input={}/missing.png: no such picture"),
        ({"input": "*.zzz"}, "input={}/*.zzz: no such picture"),
        ({"input": "empty"}, "input={}/empty: no picture in this folder"),
        ({"input": "blank.png"}, "input={}/blank.png: a blank picture, or no digit in it"),
        ({"input": "dot.png"}, "input={}/dot.png: a blank picture, or no digit in it"),
        ({"frame": False}, "frame=false: is for pictures, name them with input=..."),
        ({"invert": False}, "invert=false: is for pictures, name them with input=..."),
        ({"checkpoint": "note.txt"}, "checkpoint={}/note.txt: damaged, or not a checkpoint"),
        ({"checkpoint": "a.onnx"}, "checkpoint={}/a.onnx: an exported file; app.predict runtime="),
        (
            {"checkpoint": "a.pt2"},
            "checkpoint={}/a.pt2: an exported file; scripts/run_pt2.cpp",
        ),
        ({"checkpoint": "missing.pt"}, "checkpoint={}/missing.pt: no such file"),
        ({"checkpoint": "empty"}, "checkpoint={}/empty: no best.pt in this folder, train one with"),
        (
            {"checkpoint": "runs"},
            "checkpoint={0}/runs: no best.pt in this folder, did you mean checkpoint={0}/runs/a?",
        ),
        (
            {"checkpoint": "lost"},
            "checkpoint={0}/lost: no best.pt in this folder, did you mean checkpoint={0}/lost/last",
        ),
        (
            {"checkpoint": "half.pt"},
            "checkpoint={}/half.pt: damaged, or not a checkpoint: take another, or train one with ",
        ),
        ({"checkpoint": None, "outputs": "empty"}, "no run under {}/empty"),
    ],
)
def test_usage_error_is_one_line(cfg, tmp_path, capsys, changes, says):
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.onnx").touch()
    (tmp_path / "a.pt2").touch()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "best.pt").touch()
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "last.pt").touch()
    (tmp_path / "half.pt").write_bytes((tmp_path / "best.pt").read_bytes()[:20000])
    Image.new("L", (50, 50), 255).save(tmp_path / "blank.png")
    dot = Image.new("L", (140, 140))
    ImageDraw.Draw(dot).ellipse((60, 60, 74, 74), 255)
    dot.save(tmp_path / "dot.png")
    before = sorted(tmp_path.rglob("*"))
    changes = {key: value and f"{tmp_path}/{value}" for key, value in changes.items()}
    with pytest.raises(UserError) as raised:
        predict(replace(cfg, **changes))
    assert str(raised.value).startswith(says.format(tmp_path))
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_command_prints_predictions(command, trained_run, tmp_path):
    name = tmp_path / "IMG (1).png"
    picture(name, "7")
    where = f"outputs={trained_run.parents[1]}"
    done = command("app.predict", where, f"input={name}")
    best = trained_run / "best.pt"
    assert (done.returncode, done.stderr) == (0, f"using {best} (finished)\n")
    assert done.stdout.startswith(f"{name}  ")
    assert list((tmp_path / "here").iterdir()) == []
