"""The list of networks of app.draw."""

import dataclasses
import json
import socket

import onnx
import pytest
from omegaconf import OmegaConf
from onnx import helper

from app.config.contents import RESULTS
from app.config.errors import UserError
from app.config.schema import DrawConfig
from app.runs.folder import CONFIG, SUMMARY
from app.web.networks import find_networks
from app.web.server import serve


def write_onnx(path, **metadata):
    model = helper.make_model(helper.make_graph([], "empty", [], []))
    common = {"dataset": "digits", "classes": json.dumps(list("0123456789"))}
    common |= {"mean": "0.1", "std": "0.3"}
    helper.set_model_props(model, common | metadata)
    onnx.save(model, path)


@pytest.fixture
def run(make_run):
    """Return the folder of a finished run with 99 % test accuracy."""
    folder = make_run()
    (folder / CONFIG.parent).mkdir()
    OmegaConf.save({"model": {"name": "lenet"}, "data": {"name": "digits"}}, folder / CONFIG)
    summary = {"status": "finished"} | dict.fromkeys(RESULTS, 1) | {"test_accuracy": 0.99}
    (folder / SUMMARY).write_text(json.dumps(summary))
    return folder


def test_each_file_has_its_own_accuracy(run):
    def accuracies():
        found = find_networks(str(run.parents[1])).values()
        return {entry.path.name: entry.accuracy for entry in found}

    write_onnx(run / "model.onnx", test_accuracy="0.98")
    write_onnx(run / "model-int8.onnx", test_accuracy="0.97")
    write_onnx(run / "foreign.onnx")
    write_onnx(run / "percent.onnx", test_accuracy="97")
    write_onnx(run / "text.onnx", test_accuracy="high")
    (run / "damaged.onnx").write_bytes(b"PK")
    unknown = dict.fromkeys(["foreign.onnx", "percent.onnx", "text.onnx", "damaged.onnx"])
    known = {"best.pt": 0.99, "model.onnx": 0.98, "model-int8.onnx": 0.97}
    assert accuracies() == known | unknown
    write_onnx(run / "model.onnx", test_accuracy="0.5")
    assert accuracies()["model.onnx"] == 0.5


def test_last_checkpoint_has_no_accuracy(run):
    """summary.json has that of best.pt."""
    last = (run / "best.pt").rename(run / "last.pt")
    assert [x.accuracy for x in find_networks(str(run), str(last)).values()] == [None]


@pytest.mark.parametrize(
    ("config", "summary"),
    [
        ({"model": [1]}, {}),
        ({"model": {"name": "lenet", "act": ["relu"]}, "data": {"name": "digits"}}, {}),
        ({"model": {"name": "lenet"}, "data": "digits"}, {}),
        ({"model": {"name": "lenet"}, "data": {"name": 3}}, {}),
        ({"model": {"name": "lenet"}}, {}),
        (None, {"test_accuracy": float("nan")}),
        (None, {"test_accuracy": "high"}),
        (None, {"parameters": [1]}),
        (None, {"dataset": {}}),
        (None, {"status": ["finished"]}),
    ],
)
def test_run_with_wrong_types_is_listed(run, config, summary):
    if config is not None:
        OmegaConf.save(config, run / CONFIG)
    written = json.loads((run / SUMMARY).read_text())
    (run / SUMMARY).write_text(json.dumps(written | summary))
    (entry,) = find_networks(str(run)).values()
    assert (entry.accuracy, entry.parameters) == (None, None) or config
    assert json.dumps(dataclasses.asdict(entry), default=str, allow_nan=False)
    if config is not None and "act" in str(config):
        assert entry.title == run.name


def test_missing_run_raises(tmp_path):
    with pytest.raises(UserError, match=r"^no run under .* has a best.pt: train one with"):
        serve(DrawConfig(outputs=str(tmp_path), open=False))


def test_port_in_use_raises(default_run):
    outputs = str(default_run.parents[1])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = f"^host=127.0.0.1 port={port}: cannot be listened on"
        with pytest.raises(UserError, match=says):
            serve(DrawConfig(port=port, open=False, outputs=outputs))


def test_checkpoint_is_listed_first(make_run):
    runs = [make_run("relu"), make_run("gelu")]
    outputs = str(runs[0].parents[1])
    for run in runs:
        first, *others = find_networks(outputs, str(run)).values()
        assert first.path == run / "best.pt"
        assert len(others) == 1
    with pytest.raises(UserError, match=r"^checkpoint=nowhere: no such file$"):
        find_networks(outputs, "nowhere")
