"""Every mutated file loads, or ends in one line, within seconds and little memory."""

import io
import json
import random
import re
import time
from pathlib import Path

import onnx
import pytest
import torch
from omegaconf import OmegaConf

from app.config.contents import RESULTS
from app.config.errors import RunError, UserError
from app.config.schema import ExportConfig, LeNetConfig, LLTMConfig, TrainConfig
from app.export.graph import build_graph
from app.inference.onnx_runtime import load_onnx
from app.inference.predictor import load_torch
from app.runs.compare import find_entries, group_runs, table
from app.runs.folder import CONFIG, SUMMARY, create_run_folder, find_checkpoint
from app.training.state import load_config
from app.web.networks import find_networks
from tests.app.idx import random_images
from tests.app.mutations import mutate_bytes, mutate_message, mutate_values

FILES = 300
IMAGES = random_images(2)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_ends(path, mutated, use):
    """Write each of the mutated contents to `path`, call `use` and check how it ends.

    Return the number of files that `use` accepts.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    accepted, memory = 0, peak_memory()
    for index, content in enumerate(mutated):
        path.write_bytes(content)
        start = time.perf_counter()
        try:
            use()
            accepted += 1
        except (UserError, RunError) as error:
            assert str(error) and str(error).isprintable(), (index, str(error))
        except Exception as error:
            pytest.fail(f"file {index}: {error!r}")
        assert time.perf_counter() - start < 20, index
    assert peak_memory() - memory < 2 * 2**20, "KiB"
    return accepted


def peak_memory():
    """Return the peak of the resident memory of this process in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def mutations(content, decode, encode, mutate):
    """Yield `FILES` mutated contents: alternately of the bytes and of the decoded values."""
    for index in range(FILES):
        rng = random.Random(index)
        if index % 2:
            yield encode(mutate(decode(content), rng))
        else:
            yield mutate_bytes(content, rng)


def save(content):
    buffer = io.BytesIO()
    content.pop("digest", None) if isinstance(content, dict) else None
    torch.save(content, buffer)
    return buffer.getvalue()


def test_checkpoints(make_run):
    path = make_run(head="gap") / "best.pt"
    blank = torch.zeros(1, 1, 28, 28)
    expected = load_torch(path).module(blank)

    def use():
        network = load_torch(path)
        assert network.logits(IMAGES).isfinite().all()
        if "digest" in torch.load(path):  # a bit of the file was changed
            assert torch.equal(network.module(blank), expected)

    def decode(content):
        return torch.load(io.BytesIO(content))

    accepted = assert_ends(path, mutations(path.read_bytes(), decode, save, mutate_values), use)
    assert 0 < accepted < FILES / 2


@pytest.mark.parametrize("model", [LeNetConfig("gelu", "depthwise", "gap"), LLTMConfig()])
def test_exported_files(make_run, model):
    folder = make_run(model=model)
    content = build_graph(load_torch(folder), ExportConfig()).SerializeToString()

    def encode(model):
        return model.SerializeToString()

    mutated = mutations(content, onnx.load_model_from_string, encode, mutate_message)
    path = folder / "model.onnx"
    accepted = assert_ends(path, mutated, lambda: load_onnx(path).logits(IMAGES))
    assert 0 < accepted < FILES


@pytest.fixture
def run(tmp_path):
    """Return the folder of a finished run."""
    cfg = TrainConfig(outputs=str(tmp_path))
    folder = create_run_folder(cfg)
    summary = {"status": "finished"} | dict.fromkeys(RESULTS, 0.5) | {"parameters": 7}
    settings = {"dataset": "digits", "val_size": 150, "total_epochs": 2}
    (folder / SUMMARY).write_text(json.dumps(summary | settings))
    (folder / "best.pt").touch()
    return folder


def read_run(folder):
    """Read a run folder as app.report, app.draw and resume= do."""
    outputs = folder.parents[1]
    assert find_checkpoint(outputs) and find_networks(outputs)
    text = table(group_runs(find_entries(outputs)))
    assert all(line.isprintable() for line in text.splitlines())
    load_config(folder, TrainConfig(), None, {})


def parse_yaml(content):
    return OmegaConf.to_container(OmegaConf.create(content.decode()))


def write_yaml(values):
    return OmegaConf.to_yaml(values).encode(errors="ignore")


def write_json(values):
    return json.dumps(values, default=str).encode()


@pytest.mark.parametrize(
    ("name", "decode", "encode"),
    [(CONFIG, parse_yaml, write_yaml), (SUMMARY, json.loads, write_json)],
)
def test_run_folders(run, name, decode, encode, capsys):
    if name == SUMMARY:  # a short configuration is read faster
        (run / CONFIG).write_text("{model: {name: lenet}, data: {name: digits}}")
    path = run / name
    mutated = mutations(path.read_bytes(), decode, encode, mutate_values)
    accepted = assert_ends(path, mutated, lambda: read_run(run))
    assert accepted > 0
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())
