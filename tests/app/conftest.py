"""Fixtures for tests of app/: runs trained on scikit-learn's digits, offline."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

NOBODY = 65534  # the user without rights


@pytest.fixture
def short_latency_benchmark(monkeypatch):
    """Measure one image on one thread at a time for the model card, for 10 ms."""
    from app.export import model_card

    measure = model_card.median_time
    monkeypatch.setattr(model_card, "BUDGET_S", 0.01)
    monkeypatch.setattr(model_card, "median_time", lambda content, **_: measure(content, 1, 1))


@pytest.fixture
def limited_files():
    """Return a context manager that limits file sizes to simulate a full disk."""

    @contextmanager
    def limit():
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limit


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Return the folder of a run with a trained network."""

    from app.config.schema import DataConfig, LeNetConfig, OptimConfig, TrainConfig, TrainerConfig
    from app.training.trainer import train

    outputs = tmp_path_factory.mktemp("outputs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for a network of this size
    train(
        TrainConfig(
            model=LeNetConfig("ncrelu", "depthwise"),
            data=DataConfig(name="digits", val_size=150),
            optim=OptimConfig("adamw", lr=0.008),
            trainer=TrainerConfig(epochs=10, batch_size=32),
            device="cpu",
            outputs=str(outputs),
        )
    )
    torch.set_num_threads(threads)
    (best,) = outputs.rglob("best.pt")
    return best.parent


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a run folder with an untrained network of any kind."""

    from app.config.schema import LeNetConfig
    from app.models import build_model
    from app.runs.checkpoint import Checkpoint, save_checkpoint

    def make(act="relu", conv="standard", head="fc", model=None, **data):
        cfg = model or LeNetConfig(act, conv, head)
        torch.manual_seed(0)
        content = Checkpoint(
            model=build_model(cfg, 10).state_dict(),
            model_config=asdict(cfg),
            data={
                "name": "digits",
                "classes": list("0123456789"),
                "mean": 0.2,
                "std": 0.3,
                "fallback_from": None,
                "val_size": 150,
                "split_seed": 0,
            }
            | data,
        )
        folder = tmp_path / "outputs" / "2026-01-01" / f"{act}-{conv}-{head}"
        folder.mkdir(parents=True)
        save_checkpoint(folder / "best.pt", content)
        return folder

    return make


@pytest.fixture
def predictions():
    """Return predictions of six images in three classes, with two mistakes."""

    from app.inference.metrics import Predictions

    labels, predicted = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 2, 2, 0])
    confidence = torch.tensor([0.9, 0.5, 0.7, 0.6, 1.0, 0.8])
    return Predictions(["cat", "a long name", "dog"], labels, predicted, confidence)


@pytest.fixture
def command(tmp_path):
    """Return a function that runs `python -m MODULE OVERRIDES` in an empty folder."""

    def run(module, *overrides, **environment):
        inherited = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
        folder = tmp_path / "here"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", module, *overrides],
            cwd=folder,
            env=inherited | environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


@pytest.fixture
def unwritable(monkeypatch):
    """Refuse new files as a read-only folder does; a superuser may write to any folder."""

    def refuse(*arguments, dir, **options):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)


@pytest.fixture
def unprivileged():
    """Return a folder to test permissions in, as a user who is no superuser."""
    with tempfile.TemporaryDirectory() as folder:  # others may not enter tmp_path
        user = os.geteuid()
        if user == 0:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield Path(folder)
        os.seteuid(user)
