"""The list of networks of app.draw."""

import json

import pytest
from omegaconf import OmegaConf

from app.config.errors import UserError
from app.runs.folder import CONFIG, RESULTS, SUMMARY
from app.web.networks import find_networks


@pytest.fixture
def run(make_run):
    """Return the folder of a finished run with 99 % test accuracy."""
    folder = make_run()
    (folder / CONFIG.parent).mkdir()
    OmegaConf.save({"model": {"name": "lenet"}, "data": {"name": "digits"}}, folder / CONFIG)
    summary = {"status": "finished"} | dict.fromkeys(RESULTS, 1) | {"test_accuracy": 0.99}
    (folder / SUMMARY).write_text(json.dumps(summary))
    return folder


def test_published_copies_are_not_listed(run):
    (run / "site").mkdir()
    for name in ("model.onnx", "network.json"):
        (run / "site" / name).touch()
    assert [entry.path for entry in find_networks(str(run)).values()] == [run / "best.pt"]


def test_networks_in_a_folder_named_web_are_listed(run):
    web = run.rename(run.parent / "web")
    assert [entry.path for entry in find_networks(str(web)).values()] == [web / "best.pt"]
    (web / "best.pt").rename(web / "last.pt")
    with pytest.raises(UserError, match=r"has a best\.pt: train one"):
        find_networks(str(web))
