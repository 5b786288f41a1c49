import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.config.cli import explain, hydra_main
from app.config.errors import RunError, UserError
from app.config.schema import PredictConfig, TrainConfig
from app.runs.compare import find_entries
from app.runs.sweep import Sweep


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Run a task as the command `train`, here and in this process: its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(*overrides, command="train", task=lambda cfg: None):
        monkeypatch.setattr(sys, "argv", [command, *overrides])
        schema = {"train": TrainConfig, "predict": PredictConfig}[command]
        try:
            sweep = Sweep() if command == "train" else None
            hydra_main(command, schema, sweep)(task)()
        except SystemExit as end:
            return end.code
        return 0

    return call


def test_the_task_gets_the_checked_configuration(main, tmp_path):
    seen = []
    assert main("model.act=ncrelu", "optim.lr=1e-3", "data=digits", task=seen.append) == 0
    (cfg,) = seen
    assert isinstance(cfg, TrainConfig)
    assert (cfg.model.act, cfg.optim.lr, cfg.data.name) == ("ncrelu", 1e-3, "digits")
    assert list(tmp_path.iterdir()) == []  # run folders are the task's to make


@pytest.mark.parametrize(
    "path",
    [
        "plain/x.png",
        "a b.png",
        "IMG (1).png",
        "a=b, [c] {d}.png",
        "it's.png",
        'a "b".png',
        "ä.png",
        "C:\\pictures\\new (1).png",
        "*.png",
    ],
)
def test_paths_are_taken_as_they_are_typed(main, path):
    seen = []
    assert main(f"data.root={path}", task=seen.append) == 0
    assert seen[0].data.root == path


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "bogus=1",
            "bogus=1: unknown key, choose from augment, data, device, model, optim, outputs, ",
        ),
        (
            "+bogus=1",
            "bogus=1: unknown key, choose from augment, data, device, model, optim, outputs, ",
        ),
        (
            "++bogus=1",
            "bogus=1: unknown key, choose from augment, data, device, model, optim, outputs, ",
        ),
        (
            "foo/bar=1",
            "foo/bar=1: unknown key, choose from augment, data, device, model, optim, outputs, ",
        ),
        ("model.bogus=1", "model.bogus=1: unknown key, choose from act, conv"),
        ("model.act=[1,2]", "model.act=[1,2]: choose from relu, gelu, ncrelu"),
        ("model.act={a:1}", "model.act={a:1}: choose from relu, gelu, ncrelu"),
        ("optim.lr=-1", "optim.lr=-1: must be a number above 0"),
        ("trainer.epochs=abc", "trainer.epochs=abc: must be an integer, at least 1, or null"),
        ("trainer.epochs=1.5", "trainer.epochs=1.5: must be an integer, at least 1, or null"),
        ("trainer.batch_size=null", "trainer.batch_size=null: must be an integer, at least 1"),
        ("trainer.epochs.x=1", "trainer.epochs.x=1: must be an integer, at least 1, or null"),
        ("trainer=5", "trainer=5: holds the keys epochs, batch_size, log_every, checkpoint_steps"),
        ("trainer={}", "trainer={}: holds the keys epochs, batch_size, log_every"),
        ("~model.act", "~model.act: a key cannot be taken out"),
        ("~model", "~model: a key cannot be taken out"),
        ("hydra.verbose=foo", "hydra.verbose=foo: choose from true, false"),
        ("model=foo", "model=foo: choose from lenet, lenet_depthwise, lenet_involution"),
        ("data=mist", "data=mist: choose from digits, fashion_mnist, kmnist, mnist, qmnist"),
        ("device=tpu", "device=tpu: choose from auto, cpu, cuda, cuda:N"),
        ("trainer.epochs", "trainer.epochs: not of the form key=value\n"),
        ("a b=1", "a b=1: not of the form key=value\n"),
        ("model.act=[a", "model.act=[a: the value cannot be read, complete or quote it: "),
        ("model.act=relu,", "model.act=relu,: the value cannot be read, complete or quote it: "),
        ("seed=range(1,3)", "seed=range(1,3): several values need -m\n"),
        ("data.augment=2", "data.augment=2: choose from true, false\n"),
        ("data.root=${nowhere}", "data.root: Interpolation key 'nowhere' not found\n"),
        ("seed=1,2", "seed=1,2: several values need -m\n"),
        ("=1", "=1: not of the form key=value\n"),
        ("model=null", "model=null: not the name of an option, leave it out for the default"),
        ("--foo", "unrecognized arguments: --foo (--help"),
        ("--multirun=3", "argument --multirun/-m: ignored explicit argument '3'"),
        ("hydra.foo=1", "hydra.foo=1: unknown key, choose from callbacks, "),
        ("hydra.mode=foo", "hydra.mode=foo: Invalid value 'foo', expected one of [RUN, MULTIRUN]"),
        ("hydra/sweeper=optuna", "hydra/sweeper=optuna: choose from basic, or pip install"),
        ("hydra.run.dir=x", "hydra.run.dir=x: a run makes its own folder, choose outputs=..."),
        ("hydra.output_subdir=x", "hydra.output_subdir=x: a run makes its own folder"),
        ("--config-name=predict", "--config-name=predict: a command has its own configuration"),
        ("--config-dir=/nowhere", "Additional config directory '/nowhere' not found"),
    ],
)
def test_wrong_usage_is_one_line(main, tmp_path, capsys, override, line):
    assert main(override) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"error: {line}")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.act=relu"], "model.act=relu: a setting of LeNet, which model=lltm does not have"),
        (["++model.head=gap"], "model.head=gap: a setting of LeNet, which model=lltm does not"),
        (["recipe=gap"], "recipe=gap: sets model.act, which model=lltm does not have, choose reci"),
        (["recipe=best"], "recipe=best: sets model.act, which model=lltm does not have, choose"),
    ],
)
def test_settings_of_another_network_are_refused(main, capsys, overrides, line):
    assert main("model=lltm", *overrides) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
    assert main("model=lltm") == 0


def test_a_sweep_says_which_runs_have_failed(main, capsys):
    def task(cfg):
        if cfg.seed == 1:
            raise UserError("seed=1: no\n  way")
        if cfg.seed == 2:
            raise ZeroDivisionError("oh")

    assert main("-m", "seed=1,2,3", task=task) == 2
    (folder,) = Path("outputs").glob("*/*")
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == f"failed: {folder}/0: seed=1: no way"
    assert errors[1].startswith("Traceback (most recent call last)")  # a mistake in the program
    assert errors[-2:] == [f"failed: {folder}/1: oh", "error: 2 of 3 runs failed"]
    report = [(entry.status, entry.summary.get("error")) for entry in find_entries(folder)]
    assert report == [("failed", "seed=1: no way"), ("failed", "oh")]


def test_a_sweep_that_cannot_be_leaves_nothing(main, tmp_path, capsys):
    assert main("-m", "model=lenet,alexnet") == 2
    assert capsys.readouterr().err.startswith("error: model=alexnet: choose from lenet, lenet_dep")
    assert list(tmp_path.iterdir()) == []


def test_predict_has_no_groups(main, capsys):
    assert main("model=lltm", command="predict") == 2
    assert capsys.readouterr().err.startswith("error: model=lltm: unknown key, choose from checkpo")
    assert main("--help", command="predict") == 0
    output = capsys.readouterr().out
    assert "runtime: torch" in output
    assert "roups" not in output


def test_only_one_value_is_predicted_with(main, capsys):
    assert main("runtime=torch,onnx", command="predict") == 2
    assert capsys.readouterr().err == "error: runtime=torch,onnx: takes one value\n"


def test_of_several_processes_the_first_says_it(main, capsys, monkeypatch):
    def sleep(seconds):
        assert capsys.readouterr().err == ""  # before torchrun ends it

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(time, "sleep", sleep)
    assert main("--foo") == 2
    assert capsys.readouterr().err.count("\n") == 1  # the first has not


@pytest.mark.parametrize("argument", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_only_trainings_are_swept(main, tmp_path, capsys, argument):
    assert main(argument, "runtime=torch,onnx", command="predict") == 2
    assert capsys.readouterr() == ("", f"error: {argument}: only app.train takes several values\n")
    assert list(tmp_path.iterdir()) == []


def raising(error):
    def task(cfg):
        raise error

    return task


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("seed=1: no"), 2, "error: seed=1: no"),
        (RunError("it broke"), 1, "error: it broke"),
        (FileNotFoundError(2, "No such file", "there"), 1, "error: there: No such file"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_task_raises_is_one_line(main, capsys, error, code, line):
    assert main(task=raising(error)) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_mistake_in_the_program_shows_its_traceback(main, capsys):
    assert main(task=raising(ZeroDivisionError("oh"))) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback (most recent call last)")
    assert "ZeroDivisionError: oh" in errors
    assert "hydra/_internal" not in errors  # only the program's own frames


def test_full_errors_on_request(main, capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for overrides in (["seed=x"], []):
        assert main(*overrides, task=raising(UserError("no"))) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("Traceback (most recent call last)")
        assert errors.splitlines()[-1].startswith("error: ")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def run_command(folder, command, **streams):
    """Run one in a folder: its exit code and what it writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", ["--help", "data=digits", "-m data=digits seed=0,1"])
def test_a_reader_that_has_had_enough_ends_the_command_quietly(tmp_path, arguments):
    read, write = os.pipe()
    os.close(read)
    assert run_command(tmp_path, f"app.train {arguments}", stdout=write) == (141, "")
    os.close(write)
    for path in tmp_path.glob("outputs/**/summary.json"):
        assert json.loads(path.read_text())["status"] == "interrupted"


def test_a_command_without_stdout(tmp_path):
    code, errors = run_command(tmp_path, "app.predict", preexec_fn=lambda: os.close(1))
    assert code == 2
    assert errors.startswith("error: no run under outputs")
    assert errors.count("\n") == 1
    code, errors = run_command(tmp_path, "app.predict --help", preexec_fn=lambda: os.close(1))
    assert (code, errors) == (0, "")


def test_a_command_without_stderr(tmp_path):
    trained = run_command(
        tmp_path,
        "app.train data=digits data.fallback=null trainer.epochs=1",
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.close(2),
    )
    assert trained == (0, "")
    with (tmp_path / "predicted.json").open("w") as file:
        command = "app.predict format=json"
        done = run_command(tmp_path, command, stdout=file, preexec_fn=lambda: os.close(2))
    assert done == (0, "")
    assert json.loads((tmp_path / "predicted.json").read_text())["images"] == 359


def test_a_full_standard_output_is_named(tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        code, errors = run_command(tmp_path, "app.train data=digits trainer.epochs=1", stdout=full)
    assert code == 1
    assert errors.endswith("error: standard output: No space left on device\n")


def test_operators_that_are_not_built():
    explained = explain(ImportError("not compiled: run this", name="ops"), TrainConfig)
    assert isinstance(explained, RunError)
    assert str(explained) == "not compiled: run this"
    other = ImportError("no module", name="torch")
    assert explain(other, TrainConfig) is other
