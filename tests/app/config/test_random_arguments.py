"""Random command lines and environments end in exit code 0, or 2 with a line."""

import logging
import os
import random
import signal

import pytest

from app.config.environment import read_torchrun
from app.config.process import handle_signals

KEYS = [
    *("model", "data", "optim", "recipe", "seed", "outputs", "resume", "device", "bogus", "name"),
    *("model.act", "model.channels", "model.channels.0", "data.root", "data.name", "optim.lr"),
    *("trainer.epochs", "trainer.compile", "trainer.bogus", "augment", "trainer", "", " ", "."),
    *("hydra", "hydra.verbose", "hydra.mode", "hydra.job.name", "hydra.job.env_set.X", "hydra.run"),
    *("hydra.output_subdir", "hydra.searchpath", "hydra.sweep.dir", "hydra.sweeper.params"),
    *("hydra.callbacks.x._target_", "hydra.job.config.override_dirname.kv_sep", "hydra.help"),
    *("hydra/launcher", "hydra/sweeper", "hydra/help", "hydra/job_logging", "hydra/hydra_logging"),
    *("hydra.launcher._target_", "hydra.sweeper._target_", "hydra.job.id", "hydra.runtime.cwd"),
]
VALUES = [
    *("", "null", "true", "0", "1", "-1", "1e3", "nan", "inf", "lenet", "lltm", "ncrelu", "digits"),
    *("1,2", "range(3)", "range(0,9,0)", "choice(1,2)", "interval(0,1)", "glob(*)", "sort(3,1)"),
    *("[1]", "[[8],[8],[8]]", "{a: 1}", "{", "[", "'", '"', "\\", "${", "${seed}", "${x.y}"),
    *("${oc.env:HOME}", "${oc.env:NOT_SET}", "${oc.decode:x}", "${hydra:job.id}", "${now:%Y}"),
    *("ä", "\n", "\x00", "\x1b[1m", "a b", "a=b", "tag(a,1)", "str(1)", "int(x)", "json_str(1)"),
    *("cuda:9", "auto", "DEBUG", "RUN", "MULTIRUN", "none", "default", "basic", "os.getcwd", "."),
]
OPTIONS = [
    *("-m", "--multirun", "-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--cfg=job"),
    *("-i", "--info", "--info=defaults", "--info=all", "--resolve", "-p", "--package=data", "-p=x"),
    *("-cn", "--config-name=predict", "-cn=nope", "-cd", "--config-dir=.", "-cd=/nope", "--", "-"),
    *("-sc", "--shell-completion", "--run", "-r", "--epochs", "--epochs=5", "-mh", "-x", "---"),
]
ENVIRONMENT = [
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DATA_ROOT", "COLUMNS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "HYDRA_MAIN_MODULE", "OMP_NUM_THREADS"),
]
CASES = 300


def random_argument(rng):
    """Return an override or an option; one of four has a random character replaced."""
    argument = rng.choice(OPTIONS)
    if rng.random() < 0.8:
        argument = rng.choice(["", "", "", "", "+", "++", "~"]) + rng.choice(KEYS)
        argument += rng.choice(["=", "=", "=", "=", "", "==", ":"]) + rng.choice(VALUES)
    if argument and rng.random() < 0.25:
        index = rng.randrange(len(argument))
        character = rng.choice("=.,:/+~-@[]{}()'\"\\$*?# 0aä\n")
        argument = argument[:index] + character + argument[index + 1 :]
    return argument


@pytest.fixture
def process_state():
    """Restore the root logger, which Hydra configures, and the handlers of signals."""
    root = logging.getLogger()
    level, handlers, disabled = root.level, root.handlers[:], logging.root.manager.disable
    before = handle_signals()
    for name in ("root", "hydra"):  # handlers of earlier tests write to closed streams
        logging.getLogger(name if name != "root" else None).handlers.clear()
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.disable(disabled)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in (1, 2, 3))]
)
def test_random_command_lines_end_in_0_or_2(
    main, tmp_path, monkeypatch, capsys, process_state, part
):
    rng = random.Random(part)
    for _ in range(CASES // 4):
        os.chdir(tmp_path)  # hydra.job.chdir
        arguments = [random_argument(rng) for _ in range(rng.randint(1, 4))]
        command = rng.choice(["train", "train", "predict"])
        values = {rng.choice(ENVIRONMENT): rng.choice(["", "0", "1", "2", "x", "9" * 30])}
        with monkeypatch.context() as patch:
            for name, value in (values if rng.random() < 0.3 else {}).items():
                patch.setenv(name, value)
            code = main(*arguments, command=command, task=lambda cfg: read_torchrun())
        errors = capsys.readouterr().err
        case = f"{command} {arguments} {values}: {code}\n{errors}"
        assert code in (0, 2), case
        assert "Traceback" not in errors, case
        assert (errors.splitlines() or [""])[-1].startswith("error: " if code else ""), case
