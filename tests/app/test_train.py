"""`python -m app.train` in a new process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from app.runs.checkpoint import load_checkpoint
from app.runs.compare import find_entries, group_runs
from app.runs.folder import find_checkpoint
from tests.app.idx import write_dataset

NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def command(*overrides, folder, **environment):
    """Start `python -m app.train` in `folder`, offline."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("DATA_ROOT", "HYDRA_FULL_ERROR")}
    return subprocess.Popen(
        [sys.executable, "-m", "app.train", *overrides],
        cwd=folder,
        env=inherited | NO_NETWORK | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*overrides, folder, **environment):
    """Run `python -m app.train`; return exit code, stdout and stderr."""
    process = command(*overrides, folder=folder, **environment)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("model.act=foo", "model.act=foo: Input should be 'relu', 'gelu' or 'ncrelu'"),
        ("data=digits data.val_size=5000", "data.val_size=5000: must be below 1438, "),
    ],
)
def test_usage_error_is_one_line(tmp_path, overrides, line):
    code, output, errors = run(*overrides.split(), folder=tmp_path)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {line}")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_offline_training_falls_back_to_digits(tmp_path):
    code, output, errors = run("trainer.epochs=2", folder=tmp_path)
    assert code == 0
    _, warning, _ = errors.splitlines()  # between two rules
    says = "mnist is not in data/MNIST/raw and cannot be downloaded ("
    assert warning.startswith(f"WARNING: using scikit-learn's small digits data set: {says}")
    best = find_checkpoint(tmp_path / "outputs")
    assert output.splitlines()[-1].endswith(str(best.relative_to(tmp_path)))
    summary = json.loads((best.parent / "summary.json").read_text())
    assert (summary["dataset"], summary["fallback_from"]) == ("digits", "mnist")
    assert load_checkpoint(best).data.fallback_from == "mnist"
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1


def test_sigint_writes_summary_and_checkpoint(tmp_path):
    write_dataset(tmp_path / "data")
    process = command("data.val_size=50", "trainer.epochs=100000", folder=tmp_path)
    while not process.stdout.readline().startswith("epoch "):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    path = next(tmp_path.rglob("last.pt")).relative_to(tmp_path)
    step = load_checkpoint(tmp_path / path).metrics["step"]
    assert step > 0
    says = f"stopped after step {step:,} (last checkpoint: {path})"
    assert output.splitlines()[-1] == f"{says}: continue with resume={path.parent}"


def test_signal_before_the_first_step_writes_no_files(tmp_path):
    slow = (
        "import time, app.data.datasets as d; d.load_dataset = lambda c: print(1) or time.sleep(60)"
    )
    code = f"{slow}; from app.train import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert not (tmp_path / "outputs").exists()


def test_sweep_continues_after_a_failed_run(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    write_dataset(tmp_path / "data")
    sweep = ["-m", "data.val_size=50", "trainer.epochs=1", "seed=1,2", "device=cuda:99,cpu"]
    sweep += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    code, _, errors = run(*sweep, folder=tmp_path)
    assert code == 2
    (folder,) = tmp_path.glob("outputs/*/*")
    named = folder.relative_to(tmp_path)
    failed = sorted(line for line in errors.splitlines() if line.startswith("failed"))
    for number, line in zip((0, 2), failed, strict=True):
        assert line.startswith(f"failed: {named}/{number}: device=cuda:99: not on this machine")
    assert errors.splitlines()[-1].startswith("error: device=cuda:99: not on this machine")
    seeds = {
        path.parent.name: json.loads(path.read_text())["seed"]
        for path in folder.glob("*/summary.json")
    }
    assert seeds == {"1": 1, "3": 2}
    entries = find_entries(folder)
    assert [entry.summary["status"] for entry in entries] == ["finished"] * 2
    assert [*group_runs(entries)] == ["all"]


@pytest.mark.exhaustive
def test_interrupted_workers_of_a_sweep_save_their_runs(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    write_dataset(tmp_path / "data")
    sweep = ["-m", "data.val_size=50", "trainer.epochs=99999", "seed=1,2,3"]
    sweep += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    process = command(*sweep, folder=tmp_path)
    while len(list(tmp_path.glob("outputs/*/*/*/last.pt"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    entries = find_entries(tmp_path)
    assert len(entries) == 2  # the third did not start
    assert [entry.summary["status"] for entry in entries] == ["interrupted"] * 2


def test_help_lists_groups_and_keys(tmp_path):
    code, output, _ = run("--help", folder=tmp_path)
    assert code == 0
    for word in ("data: digits, fashion_mnist, kmnist, mnist, qmnist", "model: lenet", "epochs: "):
        assert word in output
    assert list(tmp_path.iterdir()) == []
