import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from app.config.contents import RESULTS
from app.config.errors import UserError, WriteError
from app.config.schema import (
    DataConfig,
    LeNetConfig,
    OptimConfig,
    ReportConfig,
    TrainConfig,
    from_mapping,
)
from app.runs.compare import find_entries, report
from app.runs.folder import (
    CONFIG,
    SUMMARY,
    all_runs,
    create_run_folder,
    find_checkpoint,
    find_run,
    find_runs,
    locked,
    network_file,
    read_settings,
    read_summary,
)
from app.training.state import load_config
from app.web.networks import find_networks


def test_runs_of_the_same_second_have_different_folders(tmp_path):
    cfg = TrainConfig(outputs=str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(create_run_folder, [cfg] * 40))
    assert len(set(folders)) == 40
    for folder in folders:
        name = folder.relative_to(tmp_path).as_posix()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{8}", name)


def test_existing_folder_is_not_reused(tmp_path):
    cfg = TrainConfig(outputs=str(tmp_path))
    create_run_folder(cfg, folder=tmp_path / "same")
    with pytest.raises(UserError, match="cannot be written: File exists"):
        create_run_folder(cfg, folder=tmp_path / "same")


def test_new_run_removes_no_other_folders(tmp_path):
    for name in ("projects/.thesis.tmp", "projects/thesis/.draft.tmp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "chapter").touch()
        os.utime(tmp_path / name, (1e9, 1e9))
    before = set(tmp_path.rglob("*"))
    create_run_folder(TrainConfig(outputs=str(tmp_path)))
    assert before < set(tmp_path.rglob("*"))


def test_configuration_is_saved(tmp_path):
    cfg = TrainConfig(model=LeNetConfig(act="gelu"), outputs=str(tmp_path), seed=5)
    assert from_mapping(TrainConfig, read_settings(create_run_folder(cfg))) == cfg


def test_unwritable_folder_raises(tmp_path):
    (tmp_path / "file").touch()
    for outputs in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(UserError, match=r"outputs=.*: cannot be written: "):
            create_run_folder(TrainConfig(outputs=str(outputs)))


def test_unwritable_run_cannot_be_locked():
    reason = "^/proc: cannot be written: No such file or directory$"
    with pytest.raises(WriteError, match=reason), locked(Path("/proc")):
        pass


def test_conflicting_group_option_raises(tmp_path):
    cfg = TrainConfig(
        model=LeNetConfig(conv="depthwise"),
        data=DataConfig(name="digits"),
        optim=OptimConfig("adamw"),
        outputs=str(tmp_path),
    )
    folder = create_run_folder(cfg)

    def resumed(option, asked):
        return load_config(folder, asked, None, {option.partition("=")[0]: option})

    for option, key in {
        "data=mnist": "data.name=digits",
        "model=lenet": "model.conv=depthwise",
        "optim=muon": "optim.name=adamw",
        "optim.name=muon": "optim.name=adamw",
    }.items():
        with pytest.raises(UserError, match=f"^{option}: the run to resume has {key}; leave it"):
            resumed(option, TrainConfig())
    assert resumed("model=lenet_depthwise", TrainConfig(model=cfg.model)).optim == cfg.optim


def test_find_checkpoint_returns_the_newest(tmp_path, capsys):
    with pytest.raises(UserError, match=r"no run under .* has a best.pt: train one with `python -"):
        find_checkpoint(tmp_path)
    for age, name in enumerate(["a/new", "sweep/1", "sweep/0", "b/old"]):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "best.pt").touch()
        os.utime(folder / "best.pt", (1e9 - age, 1e9 - age))
    best = tmp_path / "a" / "new" / "best.pt"
    assert find_checkpoint(tmp_path) == best
    assert capsys.readouterr().err == f"using {best}\n"


def test_newest_run_is_the_one_started_last(tmp_path, make_run, capsys):
    """In every command, also if an older run was resumed or exported later."""
    older, newer = make_run("relu"), make_run("gelu")
    for folder, time in ((older, 1e9), (newer, 1.1e9)):
        (folder / CONFIG.parent).mkdir()
        (folder / CONFIG).write_text("{}")
        os.utime(folder / CONFIG, (time, time))
        (folder / "model.onnx").write_bytes(b"")
    for name, time in (("best.pt", 1.2e9), ("model.onnx", 1.3e9)):
        os.utime(older / name, (time + 1, time + 1))
        os.utime(newer / name, (time, time))
    outputs = str(tmp_path / "outputs")
    assert find_run("latest", outputs) == newer
    assert find_checkpoint(outputs) == newer / "best.pt"
    assert find_checkpoint(outputs, "model.onnx") == newer / "model.onnx"
    assert [path.parent for path in find_networks(outputs).values()] == [newer, older]
    report(ReportConfig("latest", outputs))
    assert capsys.readouterr().out.startswith(f"{newer}: 1 run\n")


def test_newest_run_is_the_same_in_a_copy(tmp_path):
    older, newer = (create_run_folder(TrainConfig(outputs=str(tmp_path / "a"))) for _ in range(2))
    for age, folder in enumerate((older, newer)):
        copy = tmp_path / "b" / folder.name
        shutil.copytree(folder, copy)
        os.utime(copy / CONFIG, (1e9 - age, 1e9 - age))
    assert [run.name for run in find_runs(tmp_path / "b")] == [older.name, newer.name]


def test_unreadable_checkpoint_is_not_called_damaged(unprivileged):
    (unprivileged / "best.pt").touch(mode=0)
    with pytest.raises(UserError, match=r"^checkpoint=.*best\.pt: cannot be read: Permission"):
        network_file(unprivileged, "best.pt")


def test_unreadable_run_is_not_passed_over(unprivileged, capsys):
    cfg = TrainConfig(outputs=str(unprivileged))
    readable, hidden = (create_run_folder(cfg, folder=unprivileged / name) for name in "ab")
    for folder in (readable, hidden):
        (folder / "best.pt").touch()
    hidden.chmod(0)
    assert find_runs(unprivileged) == [readable]
    assert find_checkpoint(unprivileged) == readable / "best.pt"
    assert [*find_networks(str(unprivileged)).values()] == [readable / "best.pt"]
    reason = "cannot be read: Permission denied"
    skipped = f"WARNING: skipped {hidden}: {reason}\n"
    assert capsys.readouterr().err == f"{skipped}using {readable}/best.pt (unfinished)\n"
    for path in (hidden, hidden / "best.pt"):
        with pytest.raises(UserError, match=f"^checkpoint={hidden}/best.pt: {reason}$"):
            network_file(path, "best.pt")
        with pytest.raises(UserError, match=f"^resume={path}: {reason}$"):
            find_run(str(path), "")


def test_outputs_that_are_a_file_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as raised:
        find_checkpoint(tmp_path / "file")
    reason = f"no run under {tmp_path}/file (a file, not a folder) has a best.pt: "
    assert str(raised.value).startswith(reason)


@pytest.mark.parametrize("folder", [".", "outputs"])
@pytest.mark.parametrize("find", [all_runs, find_checkpoint, find_networks, find_entries])
def test_unreadable_outputs_are_not_called_empty(unprivileged, find, folder):
    unprivileged.chmod(0)
    key = "folder" if find == find_entries else "outputs"
    with pytest.raises(UserError) as raised:
        find(unprivileged / folder)
    assert str(raised.value) == f"{key}={unprivileged / folder}: cannot be read: Permission denied"


@pytest.mark.parametrize("find", [find_networks, find_checkpoint, find_runs, find_entries])
def test_runs_deleted_during_a_search_are_skipped(tmp_path, make_run, find):
    kept = make_run()
    (kept / CONFIG.parent).mkdir()
    (kept / CONFIG).write_text("{}")
    stop = Event()

    def make_and_delete(number):
        folder = tmp_path / "outputs" / str(number)
        while not stop.is_set():
            (folder / CONFIG.parent).mkdir(parents=True)
            for name in (CONFIG, SUMMARY, "best.pt"):
                (folder / name).write_text("{}")
            shutil.rmtree(folder)

    with ThreadPoolExecutor(2) as pool:
        deleting = [pool.submit(make_and_delete, number) for number in range(2)]
        try:
            for _ in range(100):
                assert find(tmp_path / "outputs")
        finally:
            stop.set()
    assert not any(done.exception() for done in deleting)


def test_files_are_read_as_utf_8(tmp_path):
    """They are written in it, in every locale."""
    name = "Bücher/数字"
    folder = create_run_folder(TrainConfig(data=DataConfig(root=name), outputs=str(tmp_path)))
    (folder / SUMMARY).write_text(json.dumps({"error": name}, ensure_ascii=False), "utf-8")
    script = (
        "import sys; from pathlib import Path; from app.runs.folder import *;"
        "run = Path(sys.argv[1]);"
        "print(ascii([read_settings(run)['data']['root'], read_summary(run)['error']]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{[name, name]!a}\n", "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [1]\nb: *a", "must not have aliases"),
        ("a: " + "1" * 5000, "Exceeds the limit"),
        ("a: !!binary aGVsbG8=", "not JSON serializable"),
        ("a: " + "[" * 1000, "recursion"),
        ("a" * 2**17, "has more than 65,536 bytes"),
        ("model: 3", "model=3: Input should be a valid dictionary"),
        ("data: [mnist]", "data="),
        ("data: {name: cifar}", "data.name=cifar: Input should be 'mnist'"),
    ],
)
def test_unusable_configuration_raises(tmp_path, text, reason):
    (tmp_path / CONFIG.parent).mkdir()
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(UserError) as raised:
        read_settings(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / CONFIG}: cannot be read: ")
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_find_checkpoint_prints_its_choice(tmp_path, capsys):
    cfg = TrainConfig(outputs=str(tmp_path))
    run = create_run_folder(cfg)
    with pytest.raises(UserError, match=r"no run under .* has a best.pt"):
        find_checkpoint(tmp_path)
    best = run / "best.pt"
    best.touch()

    def told():
        assert find_checkpoint(tmp_path) == best
        return capsys.readouterr().err

    assert told() == f"using {best} (unfinished)\n"
    for status in ("interrupted", "failed"):
        (run / SUMMARY).write_text(json.dumps({"status": status}))
        assert told() == f"using {best} ({status})\n"
    finished = {"status": "finished"} | dict.fromkeys(RESULTS, 1)
    (run / SUMMARY).write_text(json.dumps(finished))
    assert told() == f"using {best} (finished)\n"
    newer = create_run_folder(cfg)
    os.utime(best, (1e9, 1e9))
    skipped = f"skipped the newer run {newer} (unfinished), which has no best.pt"
    assert told() == f"using {best} (finished); {skipped}\n"
    newest = create_run_folder(cfg)
    assert f"skipped the newer run {newest} (unfinished)" in told()


def test_run_whose_lock_is_held_is_running(tmp_path, capsys):
    run = create_run_folder(TrainConfig(outputs=str(tmp_path)))
    (run / "best.pt").touch()
    (run / SUMMARY).write_text(json.dumps({"status": "unfinished"}))

    def told():
        find_checkpoint(tmp_path)
        report(ReportConfig(str(tmp_path)))
        output, errors = capsys.readouterr()
        return errors, output.splitlines()[-1]

    with locked(run):
        running = f"running: {run}: in another process"
        assert told() == (f"using {run}/best.pt (running)\n", running)
    unfinished = f"unfinished: {run}: continue it with `python -m app.train resume={run}`"
    assert told() == (f"using {run}/best.pt (unfinished)\n", unfinished)


def test_named_pipes_and_devices_are_not_read(tmp_path):
    """Opening a named pipe waits for a writer."""
    run = create_run_folder(TrainConfig(outputs=str(tmp_path)))
    for name in ("best.pt", SUMMARY):
        os.mkfifo(run / name)
    for path, file in ((run, run / "best.pt"), (run / "best.pt",) * 2, ("/dev/zero",) * 2):
        with pytest.raises(UserError, match=rf"^checkpoint={file}: not a regular file$"):
            network_file(path, "best.pt")
    assert read_summary(run)["status"] == "unfinished"
