import csv
import io
import json
import os
import shutil
import statistics
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from app.config.errors import RunError, UserError
from app.config.schema import ReportConfig
from app.runs.compare import find_entries, group_runs, report, table, to_csv
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


def test_table_has_mean_and_deviation_over_seeds(sweep):
    groups = group_runs(find_entries(sweep))
    assert [(item.name, len(item.entries)) for item in groups] == [
        ("model.act=relu", 6),
        ("model.act=ncrelu", 6),
    ]
    lines = table(groups).splitlines()
    deviation = statistics.stdev([0.0, 0.1, 0.2, 0.3, 0.4])
    assert lines[2].split() == (
        "model.act=relu 5 of 6 98.00 ± 0.00 % "
        f"99.20 ± {deviation:.2f} % 61,706 4.0 ± 1.6 s 20,000".split()
    )
    assert "123,026" in lines[3]
    assert len(set(map(len, lines))) == 1  # aligned


def test_group_without_results_shows_its_status(sweep):
    for path in sweep.glob("*/summary.json"):
        path.write_text(json.dumps({"status": "failed", "error": "no"}))
    lines = table(group_runs(find_entries(sweep))).splitlines()
    assert lines[2].split() == ["model.act=relu", "0", "of", "6", "failed"]
    assert lines[3].split()[-3:] == ["failed", "or", "unfinished"]
    report(ReportConfig(str(sweep)))


def test_table_rounds_settings_and_csv_does_not(sweep):
    rates = (0.028332004457282706, 0.028332004999999999, 1e12)
    for number, rate in enumerate(rates):
        path = sweep / str(2 * number) / CONFIG
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), {"optim": {"lr": rate}}), path)
    entries = find_entries(sweep)[-3:]  # by start time
    assert [item.name for item in group_runs(entries)] == [
        "optim.lr=0.02833",
        "optim.lr=0.02833",
        "optim.lr=1e+12",
    ]
    rows = csv.DictReader(io.StringIO(to_csv(entries)))
    assert [float(row["optim.lr"]) for row in rows] == list(rates)


def test_fallback_runs_are_grouped_by_the_data_set_used(sweep):
    for number in range(10):
        file = sweep / str(number) / "summary.json"
        used = {"dataset": "digits" if number < 6 else "mnist"}
        file.write_text(json.dumps(json.loads(file.read_text()) | used))
    names = {item.name for item in group_runs(find_entries(sweep))}
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
    assert [(item.name, len(item.entries)) for item in group_runs(find_entries(sweep))] == [
        ("model.act=relu", 6),
        ("model.act=ncrelu", 6),
    ]


def test_names_omit_settings_that_follow_from_the_recipe(sweep):
    best = {"recipe": "best", "model": {"act": "gelu"}, "optim": {"ema": 0.99}}
    for number, change in ((0, best), (1, best | {"trainer": {"epochs": 7}})):
        path = sweep / str(number) / CONFIG
        OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), change), path)
    names = {item.name for item in group_runs(find_entries(sweep))}
    assert not any("optim.ema" in name for name in names)
    assert sum("recipe=best" in name for name in names) == 2


def test_missing_settings_are_empty(sweep):
    config = {"model": {"name": "lltm", "act": "relu", "conv": "standard"}, "seed": 0}
    OmegaConf.save(OmegaConf.create(config), sweep / "2" / CONFIG)
    entries = find_entries(sweep)
    assert {item.name: len(item.entries) for item in group_runs(entries)} == {
        "model.name=lenet model.act=relu": 5,
        "model.name=lenet model.act=ncrelu": 6,
        "model.name=lltm": 1,
    }
    rows = list(csv.DictReader(io.StringIO(to_csv(entries))))
    assert (rows[-1]["model.act"], rows[-1]["model.name"]) == ("", "lltm")


def test_settings_of_other_networks(sweep):
    """Settings of a network are named only if they differ among its runs."""

    def names():
        return [item.name for item in group_runs(find_entries(sweep))]

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
    assert [item.name for item in group_runs(find_entries(sweep))] == [
        "model.act=relu",
        "model.act=ncrelu",
    ]


def test_csv_has_a_line_for_each_run(sweep):
    rows = list(csv.DictReader(io.StringIO(to_csv(find_entries(sweep)))))
    assert [row["run"].rsplit("/", 1)[1] for row in rows] == [str(number) for number in range(12)]
    assert (rows[3]["model.act"], rows[3]["seed"], rows[3]["status"]) == ("ncrelu", "1", "finished")
    assert float(rows[3]["test_accuracy"]) == pytest.approx(0.991)
    assert (rows[10]["status"], rows[10]["error"]) == ("failed", "the loss is nan at step 3")
    assert rows[11]["status"] == "unfinished"


@pytest.mark.parametrize("folder", ["latest", "sweep"])
def test_report_writes_csv(sweep, capsys, folder):
    report(ReportConfig(folder if folder == "latest" else str(sweep), str(sweep.parents[1])))
    output = capsys.readouterr().out
    assert "12 runs" in output
    assert f"failed: {sweep}/10: the loss is nan at step 3\n" in output
    resume = f"continue it with `python -m app.train resume={sweep}/11`"
    assert f"unfinished: {sweep}/11: {resume}\n" in output
    assert (sweep / "report.csv").is_file()


def test_report_on_one_run(sweep, capsys):
    report(ReportConfig(str(sweep / "0")))
    assert "99.00 %" in capsys.readouterr().out
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


def test_unwritable_folder_raises_after_the_table(sweep, capsys):
    (sweep / "report.csv").mkdir()
    with pytest.raises(RunError, match=rf"^{sweep}/report.csv: cannot be written: Is a dir"):
        report(ReportConfig(str(sweep)))
    assert capsys.readouterr().out.startswith(f"{sweep}: 12 runs\n\n")


def test_read_only_folder_is_unusable_input(sweep, capsys, unwritable):
    with pytest.raises(UserError, match=rf"^{sweep}: cannot be written: Permission denied$"):
        report(ReportConfig(str(sweep)))
    assert capsys.readouterr().out.startswith(f"{sweep}: 12 runs\n\n")


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
    done = subprocess.run([*command, str(sweep)], capture_output=True, text=True, check=True)
    assert "model.act=relu" in done.stdout
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("lenet-ops ")
    newest = [*command, f"outputs={sweep.parent}"]
    assert done.stdout == subprocess.run(newest, capture_output=True, text=True).stdout
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: no run under nowhere/ (no such folder): train one with `python -m app.train`\n",
    )
    traced = os.environ | {"HYDRA_FULL_ERROR": "1"}
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, env=traced)
    assert done.stderr.startswith("Traceback (most recent call last)")
    for wrong, says in (
        (["--foo"], "unrecognized arguments: --foo (--help shows the options)"),
        (
            ["latest", "--output", "x"],
            "unrecognized arguments: --output x (--help shows the options)",
        ),
        ([""], "folder=: Input should not be blank"),
        (["--outputs", " "], "outputs= : Input should not be blank"),
    ):
        done = subprocess.run([*command, *wrong], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, f"error: {says}\n")
