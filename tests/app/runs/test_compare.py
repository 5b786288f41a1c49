import json
import os
import shutil
import statistics
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from app.config.errors import UserError
from app.config.schema import ReportConfig
from app.runs.compare import find_entries, group_runs, report, table
from app.runs.folder import CONFIG


@pytest.fixture
def sweep(tmp_path):
    """Return a sweep of two activations and two seeds, with a failed and a killed run."""
    root = tmp_path / "outputs" / "2026-01-31" / "12-00-00-abcd"
    for number in range(12):
        act, seed = ("relu", "ncrelu")[number % 2], number // 2
        folder = root / str(number)
        (folder / CONFIG.parent).mkdir(parents=True)
        model = {"name": "lenet", "act": act, "conv": "standard"}
        config = {"model": model, "seed": seed, "device": f"cuda:{seed}"}
        OmegaConf.save(OmegaConf.create(config), folder / CONFIG)
        summary = {
            "status": "finished",
            "test_accuracy": 0.99 + 0.001 * seed,
            "val_accuracy": 0.98,
            "parameters": 61706 if act == "relu" else 123026,
            "training_seconds": 2.0 + seed,
            "images_per_second": 20000.0,
        }
        if number == 10:
            summary = {"status": "failed", "error": "the loss is nan at step 3"}
        if number != 11:
            (folder / "summary.json").write_text(json.dumps(summary))
    (root / "12" / CONFIG.parent).mkdir(parents=True)  # killed before it wrote its configuration
    return root


def sizes(groups):
    return {name: len(summaries) for name, summaries in groups.items()}


def test_table_has_mean_and_deviation_over_seeds(sweep):
    groups = group_runs(find_entries(sweep))
    assert sizes(groups) == {"model.act=relu": 6, "model.act=ncrelu": 6}
    lines = table(groups).splitlines()
    deviation = statistics.stdev([0.0, 0.1, 0.2, 0.3, 0.4])
    expected = "model.act=relu 5 of 6 98.00% ± 0.00% 99.20% ± {:.2f}% 4.0 ± 1.6 20,000 ± 0"
    assert lines[1].split() == expected.format(deviation).split()
    assert len(set(map(len, lines))) == 1  # aligned


def test_group_without_results_has_no_numbers(sweep):
    for path in sweep.glob("*/summary.json"):
        path.write_text(json.dumps({"status": "failed", "error": "no"}))
    lines = table(group_runs(find_entries(sweep))).splitlines()
    assert lines[1].split() == ["model.act=relu", "0", "of", "6"]


def test_fallback_runs_are_grouped_by_the_data_set_used(sweep):
    for number in range(10):
        file = sweep / str(number) / "summary.json"
        used = {"dataset": "digits" if number < 6 else "mnist"}
        file.write_text(json.dumps(json.loads(file.read_text()) | used))
    names = {*group_runs(find_entries(sweep))}
    assert {f"model.act=relu data.name={name}" for name in ("digits", "mnist")} <= names


def test_settings_that_training_resolved_are_compared(sweep):
    """After a fallback to digits data.val_size is smaller; trainer.epochs=null is a number."""
    used = {"dataset": "digits", "val_size": 150, "total_epochs": 9}
    for number in range(12):
        asked = {"data": {"name": "mnist", "val_size": 5000}, "trainer": {"epochs": None}}
        if number % 4 < 2:
            asked = {"data": {"name": "digits", "val_size": 150}, "trainer": {"epochs": 9}}
        path = sweep / str(number) / CONFIG
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), asked), path)
        file = sweep / str(number) / "summary.json"
        summary = json.loads(file.read_text()) if file.is_file() else {"status": "unfinished"}
        file.write_text(json.dumps(summary | used))
    groups = group_runs(find_entries(sweep))
    assert sizes(groups) == {"model.act=relu": 6, "model.act=ncrelu": 6}


def test_names_omit_settings_that_follow_from_the_recipe(sweep):
    best = {"recipe": "best", "model": {"act": "gelu"}, "optim": {"ema": 0.99}}
    best["trainer"] = {"epochs": 20}
    changes = {key: {"recipe": "fast", "trainer": {"epochs": 2}} for key in range(2, 12)}
    for number, change in ({0: best, 1: best | {"trainer": {"epochs": 7}}} | changes).items():
        path = sweep / str(number) / CONFIG
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), change), path)
    names = {*group_runs(find_entries(sweep))}
    assert not any("optim.ema" in name for name in names)
    assert sum("recipe=best" in name for name in names) == 2


def test_missing_settings_are_omitted(sweep):
    config = {"model": {"name": "lltm", "act": "relu", "conv": "standard"}, "seed": 0}
    OmegaConf.save(OmegaConf.create(config), sweep / "2" / CONFIG)
    entries = find_entries(sweep)
    assert sizes(group_runs(entries)) == {
        "model.name=lenet model.act=relu": 5,
        "model.name=lenet model.act=ncrelu": 6,
        "model.name=lltm": 1,
    }


def test_settings_of_other_networks(sweep):
    """Settings of a network are named only if they differ among its runs."""

    def names():
        return [*group_runs(find_entries(sweep))]

    for number, width in ((0, 40), (1, 48)):
        model = {"name": "separable", "channels": [[16], [24], [width]]}
        OmegaConf.save({"model": model, "seed": 0}, sweep / str(number) / CONFIG)
        if number == 0:
            lenets = ["model.name=lenet model.act=ncrelu", "model.name=lenet model.act=relu"]
            assert sorted(names()) == [*lenets, "model.name=separable"]
    assert {f"model.name=separable model.channels=[[16], [24], [{n}]]" for n in (40, 48)} < {
        *names()
    }


def test_settings_without_influence_on_results_are_not_compared(sweep):
    for number in range(12):
        path = sweep / str(number) / CONFIG
        trainer = {"checkpoint_seconds": number, "checkpoint_steps": number, "log_every": number}
        added = {"trainer": trainer, "data": {"fallback": None if number % 3 else "digits"}}
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), added), path)
    assert [*group_runs(find_entries(sweep))] == ["model.act=relu", "model.act=ncrelu"]


@pytest.mark.parametrize("folder", ["latest", "sweep"])
def test_report_lists_unfinished_runs(sweep, capsys, folder):
    report(ReportConfig(folder if folder == "latest" else str(sweep), str(sweep.parents[1])))
    output = capsys.readouterr().out
    assert "12 runs" in output
    assert f"failed: {sweep}/10: the loss is nan at step 3\n" in output
    resume = f"continue it with `python -m app.train resume={sweep}/11`"
    assert f"unfinished: {sweep}/11: {resume}\n" in output


def test_report_on_one_run(sweep, capsys):
    report(ReportConfig(str(sweep / "0")))
    assert "99.00%" in capsys.readouterr().out
    alone = sweep.parent / "12-00-01-abcd"
    shutil.copytree(sweep / "0", alone)
    os.utime(alone / CONFIG, (2e9, 2e9))
    report(ReportConfig("latest", str(sweep.parents[1])))
    assert f"{alone}: 1 run\n" in capsys.readouterr().out


def test_latest_finds_a_sweep_of_named_runs(sweep, capsys):
    (sweep / "9").rename(sweep / "last")
    os.utime(sweep / "last" / CONFIG, (2e9, 2e9))
    (sweep / "multirun.yaml").touch()
    report(ReportConfig("latest", str(sweep.parents[1])))
    assert f"{sweep}: 12 runs\n" in capsys.readouterr().out


def test_folder_without_runs_raises(tmp_path):
    hint = "train one with `python -m app.train`"
    for folder, outputs in (("nowhere", "outputs"), ("latest", "nowhere")):
        with pytest.raises(UserError, match=rf"^no run under nowhere/ \(no such folder\): {hint}$"):
            report(ReportConfig(folder, outputs))
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=rf"^no run under {tmp_path}/file \(a file, not a folder\): "
    ):
        report(ReportConfig(str(tmp_path / "file")))
    for folder, outputs in ((str(tmp_path), "outputs"), ("latest", str(tmp_path))):
        with pytest.raises(UserError, match=rf"^no run under {tmp_path}/: {hint}$"):
            report(ReportConfig(folder, outputs))


@pytest.mark.parametrize("content", ["- 1", "a: [b", '{"a": ', '{"status": "finished"}'])
def test_run_with_damaged_summary_counts_as_unfinished(sweep, capsys, content):
    (sweep / "2" / "summary.json").write_text(content)
    report(ReportConfig(str(sweep)))
    output, errors = capsys.readouterr()
    assert "4 of 6" in output
    assert f"unfinished: {sweep}/2: continue it with `python -m app.train resume=" in output
    assert errors.startswith(f"WARNING: {sweep}/2/summary.json: cannot be read: ")
    remedy = f"the run counts as unfinished, resume={sweep}/2 writes the file anew"
    assert errors.endswith(f"; {remedy}\n")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("content", ["- 1", "a: [b"])
def test_run_with_damaged_configuration_is_skipped(sweep, capsys, content):
    (sweep / "3" / CONFIG).write_text(content)
    report(ReportConfig(str(sweep)))
    output, errors = capsys.readouterr()
    assert output.startswith(f"{sweep}: 11 runs\n")
    assert errors.startswith(f"WARNING: skipped a run: {sweep}/3/{CONFIG}: cannot be read: ")
    assert errors.count("\n") == 1
    with pytest.raises(UserError, match=rf"3/{CONFIG}: cannot be read: [^\n]+$"):
        report(ReportConfig(str(sweep / "3")))


def test_command_exit_codes_and_output(sweep):
    command = [sys.executable, "-m", "app.report"]
    done = subprocess.run([*command, f"folder={sweep}"], capture_output=True, text=True, check=True)
    assert "model.act=relu" in done.stdout
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("lenet-ops ")
    newest = [*command, f"outputs={sweep.parent}"]
    assert done.stdout == subprocess.run(newest, capture_output=True, text=True).stdout
    done = subprocess.run([*command, "folder=nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: no run under nowhere/ (no such folder): train one with `python -m app.train`\n",
    )
    traced = os.environ | {"HYDRA_FULL_ERROR": "1"}
    done = subprocess.run([*command, "folder=nowhere"], capture_output=True, text=True, env=traced)
    assert done.stderr.startswith("Traceback (most recent call last)")
    for wrong, says in (
        (["--foo"], "unrecognized arguments: --foo (--help shows the options)"),
        (["folder="], "folder=: Input should not be blank"),
    ):
        done = subprocess.run([*command, *wrong], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, f"error: {says}\n")
