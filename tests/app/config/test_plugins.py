"""Errors of Hydra's plug-ins, with plug-ins like those of Optuna and Slurm."""

import pytest

FAKE = '''
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra._internal.core_plugins.basic_launcher import BasicLauncher


class FakeSweeper(Sweeper):
    """Raise in one line, in two lines, or after a run with the value of `seed`."""

    def __init__(self, seed):
        self.seed = seed

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = BasicLauncher()
        self.launcher.setup(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        if self.seed is None:
            raise ValueError("low <= high\\n  must hold")
        (result,) = self.launcher.launch([[f"seed={self.seed}", *arguments]], initial_job_idx=0)
        try:
            result.return_value
        except ZeroDivisionError:
            raise
        except Exception:
            raise ValueError("No trials are completed yet.")


class FakeLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        raise RuntimeError('Could not detect "srun"')

    def launch(self, job_overrides, initial_job_idx):
        pass


for kind, plugin in (("sweeper", FakeSweeper), ("launcher", FakeLauncher)):
    node = {"_target_": f"hydra_plugins.fake.{plugin.__name__}"}
    if kind == "sweeper":
        node["seed"] = None
    ConfigStore.instance().store(group=f"hydra/{kind}", name="fake", node=node)
'''
TRAIN = """
from app.config.cli import run_command
from app.config.errors import UserError
from app.config.schema import TrainConfig


def task(cfg):
    if cfg.seed == 1:
        raise UserError("seed=1: no")
    1 / cfg.seed


run_command("train", TrainConfig, task)
"""


@pytest.fixture
def sweep(command, tmp_path):
    """Return a function that runs a sweep of short runs with the plug-ins above."""
    here = tmp_path / "here"
    (here / "hydra_plugins").mkdir(parents=True)
    (here / "hydra_plugins" / "fake.py").write_text(FAKE)
    (here / "task.py").write_text(TRAIN)
    return lambda *overrides, **environment: command("task", "-m", *overrides, **environment)


@pytest.mark.parametrize(
    ("overrides", "code", "line"),
    [
        (["hydra/launcher=fake"], 2, 'hydra/launcher=fake: Could not detect "srun"'),
        (["hydra/sweeper=fake"], 2, "hydra/sweeper=fake: low <= high must hold"),
        (
            ["hydra/sweeper=fake", "hydra.sweeper.seed=1"],
            2,
            "hydra/sweeper=fake hydra.sweeper.seed=1: No trials are completed yet.",
        ),
    ],
)
def test_error_of_a_plugin_is_one_line(sweep, overrides, code, line):
    done = sweep(*overrides)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"error: {line}"
    assert "Traceback" not in done.stderr
    done = sweep(*overrides, HYDRA_FULL_ERROR="1")
    assert done.returncode == code
    assert "Traceback (most recent call last)" in done.stderr


def test_unexpected_error_of_a_run_shows_its_traceback(sweep):
    done = sweep("hydra/sweeper=fake", "hydra.sweeper.seed=0")
    assert done.returncode == 1
    assert done.stderr.startswith("failed: outputs/")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
