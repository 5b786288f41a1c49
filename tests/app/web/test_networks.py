"""The list of networks of app.draw."""

import json
import socket

import pytest
from omegaconf import OmegaConf

from app.config.contents import RESULTS
from app.config.errors import UserError
from app.config.schema import DrawConfig
from app.runs.folder import CONFIG, SUMMARY
from app.web.networks import find_networks, title_of
from app.web.server import serve


@pytest.fixture
def run(make_run):
    """Return the folder of a finished run with 99 % test accuracy."""
    folder = make_run()
    (folder / CONFIG.parent).mkdir()
    OmegaConf.save({"model": {"name": "lenet"}, "data": {"name": "digits"}}, folder / CONFIG)
    summary = {"status": "finished"} | dict.fromkeys(RESULTS, 1) | {"test_accuracy": 0.99}
    (folder / SUMMARY).write_text(json.dumps(summary))
    return folder


def titles(*arguments):
    return [title_of(path) for path in find_networks(*arguments).values()]


def test_title_has_settings_and_accuracy(run):
    assert titles(str(run.parents[1])) == [f"lenet · 99.00% · {run.parent.name}/{run.name}"]


def test_last_checkpoint_has_no_accuracy(run):
    """summary.json has that of best.pt."""
    last = (run / "best.pt").rename(run / "last.pt")
    assert titles(str(run), str(last)) == [f"lenet · {run.name}/last.pt"]


@pytest.mark.parametrize(
    ("config", "summary"),
    [
        ({"model": [1]}, {}),
        ({"model": {"name": "lenet"}, "data": "digits"}, {}),
        ({"model": {"name": "lenet"}, "data": {"name": 3}}, {}),
        ({}, {"test_accuracy": float("nan")}),
        ({}, {"test_accuracy": "high"}),
        ({}, {"status": ["finished"]}),
    ],
)
def test_run_with_wrong_types_is_listed(run, config, summary):
    OmegaConf.save(config, run / CONFIG)
    written = json.loads((run / SUMMARY).read_text())
    (run / SUMMARY).write_text(json.dumps(written | summary))
    (title,) = titles(str(run))
    assert title.endswith(run.name)
    assert ("99.00%" in title) == (not summary)


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
        assert first == run / "best.pt"
        assert len(others) == 1
    with pytest.raises(UserError, match=r"^checkpoint=nowhere: no such file$"):
        find_networks(outputs, "nowhere")
