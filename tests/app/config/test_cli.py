import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.config.cli import swept_dir
from app.config.errors import RunError, UserError
from app.config.schema import LLTMConfig, TrainConfig

ROOT = Path(__file__).parents[3]


def test_task_receives_the_validated_configuration(main, tmp_path):
    seen = []
    assert main("model.act=ncrelu", "optim.lr=1e-3", "data=digits", task=seen.append) == 0
    (cfg,) = seen
    assert isinstance(cfg, TrainConfig)
    assert (cfg.model.act, cfg.optim.lr, cfg.data.name) == ("ncrelu", 1e-3, "digits")
    assert list(tmp_path.iterdir()) == []  # Hydra makes no folders


@pytest.mark.parametrize(
    "path",
    [
        "plain/x.png",
        "2026",
        "2026_11",
        "1e3",
        "true",
        "[a]",
        "{a: 1}",
        "a,b.png",
        "range(3)",
        "a b.png",
        "IMG (1).png",
        "a=b, [c] {d}.png",
        "it's.png",
        'a "b".png',
        "ä.png",
        "C:\\pictures\\new (1).png",
        "C:\\pictures (1)\\",
        "a b\\\\",
        "it\\'s.png",
        "*.png",
    ],
)
def test_paths_need_no_escapes(main, path):
    seen = []
    assert main(f"input={path}", command="predict", task=seen.append) == 0
    assert seen[0].input == path


def test_paths_of_a_sweep_may_look_like_numbers(main):
    seen = []
    assert main("-m", "outputs=2026_11", "data.root=a,b", task=seen.append) == 0
    assert [(cfg.outputs, cfg.data.root) for cfg in seen] == [("2026_11", "a"), ("2026_11", "b")]


TOP = "augment, data, device, model, optim, outputs, recipe, resume, seed, trainer\n"
MODELS = "choose from lenet, lenet_depthwise, lenet_involution, lltm, separable, tiny\n"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("bogus=1", f"bogus: unknown key, choose from {TOP}"),
        ("+bogus=1", f"bogus: unknown key, choose from {TOP}"),
        ("+model.act=foo", "model.act=foo: Input should be 'relu', 'gelu' or 'ncrelu'\n"),
        ("+model=foo", f"model=foo: {MODELS}"),
        ("foo/bar=1", f"foo/bar: unknown key, choose from {TOP}"),
        ("model.bogus=1", "model.bogus: unknown key, choose from act, conv, head\n"),
        ("model.channels=3", "model.channels: is for model=separable or model=tiny\n"),
        ("model.act=foo", "model.act=foo: Input should be 'relu', 'gelu' or 'ncrelu'\n"),
        ("model.act=[1,2]", "model.act=[1, 2]: Input should be 'relu', 'gelu' or 'ncrelu'\n"),
        ("optim.lr=-1", "optim.lr=-1: Input should be greater than 0\n"),
        ("trainer.epochs=1.5", "trainer.epochs=1.5: Input should be a valid integer\n"),
        ("trainer.compile=no", "trainer.compile=no: Input should be 'auto', true or false\n"),
        ("seed=1\n2", "seed=1\\n2: cannot be parsed, a quote or bracket may be open\n"),
        ("trainer=5", "trainer=5: is a group, its keys are batch_size, checkpoint_seconds, "),
        ("augment=1", "augment=1: is a group, its keys are rotation, scale, shear, shift\n"),
        ("data.fallback=kmnist", "data.fallback=kmnist: Input should be 'digits' or null\n"),
        ("epochs=3", "epochs: unknown key, did you mean trainer.epochs?\n"),
        ("lr=0.1", "lr: unknown key, did you mean optim.lr?\n"),
        ("run=x", "run: unknown key, choose from augment, data, device, "),
        ("model=foo", f"model=foo: {MODELS}"),
        ("model=1", f"model=1: {MODELS}"),
        ("model=null", f"model=null: {MODELS}"),
        ("model=", f"model=: {MODELS}"),
        ("model=../train", f"model=../train: {MODELS}"),
        ("model=.", f"model=.: {MODELS}"),
        ("data=mist", "data=mist: choose from digits, fashion_mnist, kmnist, mnist, qmnist\n"),
        ("data.name=digits", "data.name=digits: use data=digits\n"),
        ("optim.name=adamw", "optim.name=adamw: use optim=adamw\n"),
        ("device=tpu", "device=tpu: Input should be auto, cpu, cuda or cuda:N\n"),
        ("device=cuda:1.0", "device=cuda:1.0: Input should be auto, cpu, cuda or cuda:N\n"),
        ("data.root=' '", "data.root= : Input should not be blank\n"),
        ("trainer.epochs", "trainer.epochs: expected KEY=VALUE (--help lists the keys)\n"),
        ("model.act=[a", "model.act=[a: cannot be parsed, a quote or bracket may be open\n"),
        ("optim.lr=[1", "optim.lr=[1: cannot be parsed, a quote or bracket may be open\n"),
        ("seed='1", "seed='1: cannot be parsed, a quote or bracket may be open\n"),
        ("~model", "~model: expected KEY=VALUE (--help lists the keys)\n"),
        ("~seed=1", "~seed=1: expected KEY=VALUE (--help lists the keys)\n"),
        ("hydra.run.dir=x", "hydra.run.dir=x: use outputs=FOLDER, the parent of the run folders\n"),
        ("data.root=${nowhere}", "data.root: Interpolation key 'nowhere' not found\n"),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2' 1. To use it as a list"),
        ("recipe=fast,best", "Ambiguous value for argument 'recipe=fast,best' 1. "),
        ("seed=range(0,3)", "Sweep parameters 'seed=range(0,3)' requires --multirun\n"),
        ("=1", "=1: expected KEY=VALUE (--help lists the keys)\n"),
        ("hydra.verbose=5", "hydra.verbose=5: "),
        ("--experimental-rerun=", "unrecognized arguments: --experimental-rerun= (--help shows"),
        ("--foo", "unrecognized arguments: --foo (--help shows the options)\n"),
        ("--multirun=3", "argument --multirun/-m: ignored explicit argument '3' (--help shows"),
        ("hydra.foo=1", "hydra.foo: unknown key, choose from callbacks, env, "),
        ("hydra.job.chdir=x", "hydra.job.chdir: Value 'x' is not a valid bool (type str)\n"),
        ("hydra/output=nope", "hydra/output=nope: choose from default"),
    ],
)
def test_usage_error_names_the_key_in_one_line(main, tmp_path, capsys, override, line):
    assert main(override) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"error: {line}")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.act=relu"], "model.act: is for model=lenet\n"),
        (["++model.head=gap"], "model.head: is for model=lenet\n"),
        (["model.bogus=1"], "model.bogus: unknown key, none is allowed here\n"),
        (["recipe=gap"], "model.act=ncrelu: is for model=lenet\n"),
    ],
)
def test_key_of_another_network_raises(main, capsys, overrides, line):
    assert main("model=lltm", *overrides) == 2
    assert capsys.readouterr().err == f"error: {line}"
    seen = []
    assert main("model=lltm", task=seen.append) == 0
    assert seen[0].model == LLTMConfig()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.act=relu", "model.act: is for model=lenet\n"),
        ("model.channels=3", "model.channels=3: Input should be a valid list\n"),
        (
            "model.channels=[[8],[8]]",
            "model.channels=[[8], [8]]: Input should be three lists of 1 to 20 channels, ",
        ),
        ("model.channels=[[8],[0],[8]]", "model.channels.1.0=0: Input should be greater than or"),
        ("model.channels=[[8],[],[8]]", "model.channels=[[8], [], [8]]: Input should be three "),
    ],
)
def test_channels_of_separable_networks(main, capsys, override, line):
    assert main("recipe=best", override) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_sweep_runs_all_and_reports_failed_runs(main, capsys):
    seeds = []

    def task(cfg):
        seeds.append(cfg.seed)
        if cfg.seed == 1:
            raise RunError("no\n  way")
        if cfg.seed == 2:
            raise ZeroDivisionError("oh")

    assert main("-m", "seed=3,1,2,4", task=task) == 1
    assert seeds == [3, 1, 2, 4]
    (folder,) = Path("outputs").glob("*/*")
    errors = capsys.readouterr().err.splitlines()
    assert errors[:2] == [f"failed: {folder}/1: no way", f"failed: {folder}/2: oh"]
    assert errors[-1] == r"error: no\n  way"  # Hydra raises the first failure


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["seed=1,-2,-3"], "seed=-2: Input should be greater than or equal to 0\n"),
        (["seed=1", "model=lltm,lenet", "model.act=gelu"], "model.act: is for model=lenet\n"),
        (["seed=1,2", "recipe=fast,gap", "model=lltm"], "model.act=ncrelu: is for model=lenet\n"),
        (["model=lenet,alexnet"], f"model=alexnet: {MODELS}"),
        (["model=null"], f"model=null: {MODELS}"),
        (["model=lenet,../train"], f"model=lenet,../train: {MODELS}"),
        (
            ["seed=1,2", "hydra.sweep.subdir=x"],
            "hydra.sweep.subdir: runs would share a folder, add ${hydra.job.num}\n",
        ),
        (
            ["seed=1,2", "device=cpu,cpu", "hydra.sweep.subdir='seed ${seed}'"],
            "hydra.sweep.subdir: runs would share a folder, add ${hydra.job.num}\n",
        ),
        (["hydra.launcher.n_jobs=2"], "hydra.launcher.n_jobs: unknown key, choose from _target_\n"),
        (["hydra.sweeper.max_batch_size=x"], "hydra.sweeper.max_batch_size: Value 'x' of type"),
        (["hydra/sweeper=nope"], "hydra/sweeper=nope: choose from basic, or install its plug-in"),
        (["--cfg=job"], "argument --cfg/-c: not allowed with argument --multirun/-m (--help shows"),
    ],
)
def test_wrong_sweep_is_refused_before_its_first_run(main, tmp_path, capsys, overrides, line):
    ran = []
    assert main("-m", *overrides, task=ran.append) == 2
    output, errors = capsys.readouterr()
    assert (output, ran) == ("", [])
    assert errors.startswith(f"error: {line}")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("subdir", "names"),
    [
        ("${hydra.job.num}_${seed}", ["0_1", "1_2"]),
        ("${hydra.job.id}", ["0", "1"]),
        ("${hydra.job.override_dirname}", ["seed=1", "seed=2"]),
        ("of ${seed}", ["of 1", "of 2"]),
    ],
)
def test_folders_of_a_sweep_may_be_named(main, subdir, names):
    folders = []
    override = f"hydra.sweep.subdir='{subdir}'"
    assert main("-m", "seed=1,2", override, task=lambda cfg: folders.append(swept_dir())) == 0
    assert [folder.name for folder in folders] == names


def test_key_that_is_set_twice_raises(main, capsys):
    assert main("seed=1", "device=cpu", "+seed=2") == 2
    assert capsys.readouterr().err == "error: seed=1 +seed=2: set seed once\n"


def test_flags_may_stand_between_settings(main):
    seen = []
    assert main("model.act=gelu", "-m", "seed=1,2", task=seen.append) == 0
    assert [(cfg.model.act, cfg.seed) for cfg in seen] == [("gelu", 1), ("gelu", 2)]


def test_sweep_under_torchrun_is_a_usage_error(main, monkeypatch, capsys):
    torchrun = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert main("-m", "seed=1,2") == 2
    assert capsys.readouterr().err == "error: -m: a sweep cannot run under torchrun\n"


def test_only_training_can_be_swept(main, tmp_path, capsys):
    assert main("-m", "format=csv,json", command="predict") == 2
    assert capsys.readouterr().err == "error: -m: sweeps are for app.train\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("typing_extensions", ["-m", "app.train"]),
        ("argparse", ["-m", "app.report"]),
        ("slow", ["-c", "import app.config.process as p\nwith p.exit_codes(): import slow"]),
    ],
)
def test_interrupt_during_an_import_is_one_line(tmp_path, package, arguments):
    (tmp_path / f"{package}.py").write_text("print(flush=True)\nwhile True: pass")
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("version", "line"), [("1.2.3", "lenet-ops 1.2.3"), ("", "lenet-ops (sources)")]
)
def test_version_is_that_of_the_package(main, capsys, monkeypatch, version, line):
    monkeypatch.setattr("app.config.arguments.package_version", lambda: version)
    assert main("--version") == 0
    assert capsys.readouterr() == (f"{line}\n", "")


def test_predict_has_no_groups(main, capsys):
    assert main("model=lltm", command="predict") == 2
    assert capsys.readouterr().err == (
        "error: model=lltm: predict has no group 'model' (--help lists the keys)\n"
    )
    assert main("--help", command="predict") == 0
    output = capsys.readouterr().out
    assert "runtime: torch" in output
    assert "roups" not in output


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
        (PermissionError(13, "Permission denied", "there"), 2, "error: there: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_expected_failures_are_one_line(main, capsys, error, code, line):
    assert main(task=raising(error)) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_unexpected_exceptions_show_their_traceback(main, capsys):
    assert main(task=raising(ZeroDivisionError("oh"))) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback (most recent call last)")
    assert "ZeroDivisionError: oh" in errors
    assert "hydra/_internal" not in errors


def test_hydra_full_error_shows_tracebacks(main, capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for overrides in (["seed=x"], []):
        assert main(*overrides, task=raising(UserError("no"))) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("Traceback (most recent call last)")
        assert errors.splitlines()[-1].startswith("error: ")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "20000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "5"}, "5")],
)
def test_user_openmp_settings_are_kept(main, monkeypatch, environment, expected):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main() == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def run_command(folder, command, **streams):
    """Run a command in a folder; return its exit code and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", ["--help", "data=digits"])
def test_closed_output_pipe_exits_without_message(tmp_path, arguments):
    read, write = os.pipe()
    os.close(read)
    assert run_command(tmp_path, f"app.train {arguments}", stdout=write) == (141, "")
    os.close(write)
    for path in tmp_path.glob("outputs/**/summary.json"):
        assert json.loads(path.read_text())["status"] == "interrupted"


@pytest.mark.parametrize("command", ["train --help", "report --help", "train --version"])
def test_full_standard_output_is_reported(tmp_path, command):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        code, errors = run_command(tmp_path, f"app.{command}", stdout=full)
    where = "standard output or the temporary folder"
    assert (code, errors) == (1, f"error: {where}: No space left on device\n")


def test_training_into_a_full_standard_output_fails(tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        code, errors = run_command(tmp_path, "app.train data=digits trainer.epochs=1", stdout=full)
    assert code == 1
    assert errors.endswith("folder: No space left on device\n")
    assert "Exception ignored" not in errors


def test_missing_package_of_a_command_names_the_extras():
    hidden = "import sys; sys.modules['scipy'] = None; import app.draw; app.draw.main()"
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: scipy is missing: `")
