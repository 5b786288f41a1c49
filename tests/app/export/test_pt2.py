"""app.export_pt2: the compiled network in PyTorch and in a C++ program without Python."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from app.config.errors import UserError
from app.config.schema import Pt2Config
from app.data.datasets import load_test_split
from app.export.pt2 import export_pt2
from app.inference.predictor import load_torch
from tests.networks import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.export


def build_program(folder):
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    command = ["g++", "-std=c++20", "-O0", str(ROOT / "scripts" / "run_pt2.cpp")]
    command += [f"-I{torch_folder / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(folder / "run")]
    subprocess.run(command, check=True)
    return str(folder / "run")


def test_program_without_python_matches_torch(make_run, tmp_path, capsys):
    folder = make_run("ncrelu", "depthwise")
    export_pt2(Pt2Config(checkpoint=str(folder)))
    assert "0 of 359 predictions differ" in capsys.readouterr().out
    card = (folder / "model-pt2.md").read_text()
    assert card.startswith("# model.pt2\n\nLeNet with ncrelu and depthwise convolutions")
    program, (library,) = build_program(tmp_path), (ROOT / "ops").glob("_C.*so")
    original = load_torch(folder)
    for count in (1, 5):  # dynamic batch size
        images = load_test_split("digits", "data").images[:count]
        done = subprocess.run(
            [program, str(library), str(folder / "model.pt2")],
            input=original.normalize(images).numpy().tobytes(),
            capture_output=True,
            check=True,
        )
        logits = np.loadtxt(done.stdout.decode().splitlines(), ndmin=2)
        np.testing.assert_allclose(logits, original.logits(images), rtol=1e-4, atol=1e-4)
    for arguments, data, says in (
        (["nothing.so", "x"], b"", "nothing.so: cannot open"),
        ([str(library)], b"", "usage: "),
        ([str(library), str(folder / "none.pt2")], b"", "none.pt2"),
        ([str(library), str(folder / "model.pt2")], b"12", "an image has 3136 bytes"),
        ([str(library), str(folder / "model.pt2"), "uint8"], bytes(784), "dtype"),
    ):
        failed = subprocess.run([program, *arguments], input=data, capture_output=True)
        assert (failed.returncode, says in failed.stderr.decode()) == (2, True), failed.stderr


@pytest.mark.exhaustive
def test_network_of_any_size_takes_pixels(make_run, capsys):
    folder = make_run("gelu", "depthwise", head="gap")
    export_pt2(Pt2Config(checkpoint=str(folder), preprocess=True, postprocess=True))
    assert "0 of 359 predictions differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("taken", "file", "says"),
    [
        (None, "model.onnx", "must end with .pt2"),
        ("model.pt2", "model.pt2", "model.pt2 is a folder"),
        ("model-pt2.md", "model.pt2", "model-pt2.md is a folder"),
    ],
)
def test_unusable_file_raises(make_run, tmp_path, taken, file, says):
    if taken:
        (tmp_path / taken).mkdir()
    with pytest.raises(UserError, match=f"^file={tmp_path / file}: .*{says}$"):
        export_pt2(Pt2Config(checkpoint=str(make_run()), file=str(tmp_path / file)))
