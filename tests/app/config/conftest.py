import sys

import pytest

from app.config.cli import run_command
from app.config.schema import PredictConfig, TrainConfig


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Return a function that runs a task as a command in this process and returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(*overrides, command="train", task=lambda cfg: None):
        monkeypatch.setattr(sys, "argv", [command, *overrides])
        schema = {"train": TrainConfig, "predict": PredictConfig}[command]
        try:
            run_command(command, schema, task)
        except SystemExit as end:
            return end.code
        return 0

    return call
