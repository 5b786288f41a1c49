"""Resume: stopped runs end bitwise equal to uninterrupted ones; unusable checkpoints raise."""

import dataclasses
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import app.data.datasets
import app.training.state
from app.config.errors import UserError
from app.config.schema import (
    AugmentConfig,
    DataConfig,
    LeNetConfig,
    OptimConfig,
    TrainConfig,
    TrainerConfig,
)
from app.data.datasets import DownloadError
from app.runs.checkpoint import load_checkpoint, save_checkpoint
from app.runs.folder import create_run_folder, find_checkpoint, find_run, locked
from app.training import trainer as training
from app.training.state import load_config
from app.training.step import TrainStep
from app.training.trainer import train
from tests.app.idx import write_dataset
from tests.app.networks import edit_checkpoint
from tests.app.test_train import command, run
from tests.app.training.moments import before_step

EPOCHS, EPOCH_STEPS = 3, 7
TIMES = ("images_per_second", "seconds")  # not compared

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cfg(tmp_path):
    """Return a configuration with every kind of state: augmentation, Muon, EMA."""
    write_dataset(tmp_path / "data")
    return TrainConfig(
        model=LeNetConfig(act="ncrelu"),
        data=DataConfig(root=str(tmp_path / "data"), val_size=60),
        augment=AugmentConfig(rotation=10, shift=2, scale=0.1, shear=5),
        optim=OptimConfig(lr=0.1, ema=0.9),
        trainer=TrainerConfig(epochs=EPOCHS, batch_size=32, log_every=3, checkpoint_steps=2),
        device="cpu",
        outputs=str(tmp_path / "outputs"),
    )


def folders(outputs):
    found = Path(outputs).rglob(".hydra/config.yaml")
    return sorted((path.parents[1] for path in found), key=lambda path: path.stat().st_mtime_ns)


def curves(folder):
    """Return the points of all TensorBoard curves except times."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.endswith(TIMES)
    }


def assert_same(one, other):
    """Compare checkpoints and curves of two runs bit by bit."""
    for name in ("last.pt", "best.pt"):
        first, second = load_checkpoint(one / name), load_checkpoint(other / name)
        torch.testing.assert_close(first.model, second.model, rtol=0, atol=0)
        assert first.metrics == second.metrics
    ours, theirs = (load_checkpoint(folder / "last.pt").training for folder in (one, other))
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert (ours["step"], ours["best"]) == (theirs["step"], theirs["best"])
    assert curves(one) == curves(other)


class StoppedError(BaseException):
    """Simulated SIGKILL."""


def stop_at(monkeypatch, moment, count):
    """Raise StoppedError in the `count`-th call of TrainStep.take or of training.`moment`."""
    owner = TrainStep if moment == "take" else training
    original, calls = getattr(owner, moment), iter(range(1, 1000))

    def stopping(*arguments, **options):
        if next(calls) == count:
            raise StoppedError
        return original(*arguments, **options)

    monkeypatch.setattr(owner, moment, stopping)


@pytest.mark.parametrize(
    "stops",
    [
        [("take", 1)],  # before the first checkpoint
        [("take", 9), ("take", 3), ("take", 4)],
        [("evaluate", 2)],
        [("save", 4)],  # curves have points after the checkpoint
        [("test", 1)],
        [("summarize", 2)],  # after the test
    ],
    ids=lambda stops: "-".join(f"{moment}{count}" for moment, count in stops),
)
def test_resume_is_bitwise_equal(cfg, monkeypatch, stops):
    train(cfg)
    (whole,) = folders(cfg.outputs)
    for index, (moment, count) in enumerate(stops):
        stop_at(monkeypatch, moment, count)
        with pytest.raises(StoppedError):
            train(dataclasses.replace(cfg, resume="latest" if index else None))
        monkeypatch.undo()
    summary = train(dataclasses.replace(cfg, resume="latest"))
    stopped = folders(cfg.outputs)[-1]
    assert len(folders(cfg.outputs)) == 2
    assert (summary["status"], summary["steps"]) == ("finished", EPOCHS * EPOCH_STEPS)
    assert_same(whole, stopped)


def test_resume_by_checkpoint_path(cfg, monkeypatch, capsys):
    train(cfg)
    before_step(monkeypatch, 9, lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(cfg)
    monkeypatch.undo()
    whole, stopped = folders(cfg.outputs)
    train(TrainConfig(resume=str(stopped / "last.pt"), data=cfg.data, outputs=cfg.outputs))
    assert f"going on after step 10 in {stopped}" in capsys.readouterr().out
    assert_same(whole, stopped)


@pytest.mark.parametrize("damaged", [False, True])
def test_resume_of_finished_run_changes_no_files(cfg, capsys, damaged):
    summary = train(cfg)
    (folder,) = folders(cfg.outputs)
    if damaged:
        (folder / "last.pt").write_bytes(b"")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert train(dataclasses.replace(cfg, resume=str(folder))) == summary
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert "is finished" in capsys.readouterr().out


def test_resume_of_finished_run_with_another_setting_raises(cfg):
    train(cfg)
    (folder,) = folders(cfg.outputs)
    with pytest.raises(UserError, match="seed=3: the run to resume has seed=0"):
        train(dataclasses.replace(cfg, resume=str(folder), seed=3), {"seed": "seed=3"})


@pytest.fixture
def stopped(cfg, monkeypatch):
    """Return the folder of a run stopped in its second epoch."""
    stop_at(monkeypatch, "take", 11)
    with pytest.raises(StoppedError):
        train(cfg)
    monkeypatch.undo()
    return folders(cfg.outputs)[0]


def test_time_includes_the_training_before_the_resume(cfg, stopped):
    checkpoint = load_checkpoint(stopped / "last.pt")
    checkpoint.training["seconds"] = 1000.0
    save_checkpoint(stopped / "last.pt", checkpoint)
    summary = train(dataclasses.replace(cfg, resume=str(stopped)))
    assert summary["seconds"] > summary["training_seconds"] > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": LeNetConfig("gelu")}, "model.act=gelu: the run to resume has model.act=ncrelu"),
        ({"seed": 3}, "seed=3: the run to resume has seed=0"),
        ({"recipe": "best"}, "recipe=best: the run to resume has recipe=fast"),
    ],
)
def test_conflicting_override_raises(cfg, stopped, change, message):
    override = message.partition(":")[0]
    typed = {override.partition("=")[0]: override}
    with pytest.raises(UserError) as caught:
        train(dataclasses.replace(cfg, resume="latest", **change), typed)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.model_config.update(conv="depthwise"), "its contents do not fit"),
        (lambda c: c.data.update(name="kmnist"), "is of data.name=kmnist, here it is mnist"),
        (lambda c: c.data.update(mean=0.5), "is of data.mean=0.5, here it is"),
        (lambda c: c.training.clear(), "its contents do not fit: 'state'"),
        (lambda c: c.training.pop("step"), "its contents do not fit: 'step'"),
        (lambda c: c.training["state"].pop("average"), "the state of another network"),
    ],
    ids=["architecture", "data", "pixels", "no-training", "no-step", "no-average"],
)
def test_mismatched_checkpoint_raises(cfg, stopped, spoil, message):
    edit_checkpoint(stopped / "last.pt", spoil)
    before = curves(stopped)
    with pytest.raises(UserError, match=r"last\.pt") as caught:
        train(dataclasses.replace(cfg, resume="latest"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert curves(stopped) == before


def test_missing_last_checkpoint_raises_and_keeps_best(cfg, stopped):
    (stopped / "last.pt").unlink()
    best = load_checkpoint(stopped / "best.pt")
    assert best.metrics["epoch"] == 1
    best.metrics["epoch"] = 2
    save_checkpoint(stopped / "best.pt", best)
    before = {path: path.read_bytes() for path in stopped.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"its last\.pt is gone; its best network is in best"):
        train(dataclasses.replace(cfg, resume="latest"))
    assert {path: path.read_bytes() for path in stopped.iterdir() if path.is_file()} == before


def test_resume_without_checkpoint_starts_at_step_0(cfg, stopped):
    (stopped / "last.pt").unlink()
    train(dataclasses.replace(cfg, resume="latest"))
    train(cfg)
    assert_same(*folders(cfg.outputs))


def test_damaged_checkpoint_raises(cfg, stopped):
    path = stopped / "last.pt"
    newer = torch.load(path, weights_only=True) | {"format": 99}
    for content in (b"", path.read_bytes()[:-999], newer):
        if content is newer:
            torch.save(newer, path)
        else:
            path.write_bytes(content)
        reason = "has format 99" if content is newer else "damaged"
        with pytest.raises(UserError, match=rf"^resume=.*last\.pt: {reason}"):
            train(dataclasses.replace(cfg, resume="latest"))


@pytest.mark.parametrize("name", ["last.pt", "best.pt"])
def test_damaged_checkpoint_names_the_remedy(cfg, stopped, name):
    best, last = stopped / "best.pt", stopped / "last.pt"
    if name == "best.pt":  # read if last.pt is missing
        last.unlink()
    (stopped / name).write_bytes(b"")
    remedy = "move last.pt and best.pt out of this folder to start over"
    with pytest.raises(UserError, match=rf"{name}: damaged, or not a checkpoint; {remedy}$"):
        train(dataclasses.replace(cfg, resume=str(stopped)))
    last.unlink(missing_ok=True)
    best.unlink()
    train(dataclasses.replace(cfg, resume=str(stopped)))
    train(cfg)
    assert_same(*folders(cfg.outputs))


def test_unwritable_run_folder_names_the_key(cfg, stopped, unwritable):
    with pytest.raises(UserError) as caught:
        train(dataclasses.replace(cfg, resume=str(stopped)))
    reason = "cannot be written: Permission denied"
    remedy = "a resumed run writes to its own folder, so make it writable or copy it"
    assert str(caught.value) == f"resume={stopped}: {reason}; {remedy}"


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("nowhere", "resume=nowhere: not a run folder"),
        ("latest", r"no run under .*/ \(no such folder\)"),
    ],
)
def test_resume_without_run_raises(cfg, resume, message):
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(cfg, resume=resume))
    assert not Path(cfg.outputs).exists()


def test_locked_run_raises(cfg, stopped):
    again = dataclasses.replace(cfg, resume="latest")
    with locked(stopped), pytest.raises(UserError, match="going on in another process"):
        train(again)
    train(again)


def test_resume_keeps_the_fallback_data_set(cfg, monkeypatch, tmp_path):
    def no_network(*arguments):
        raise DownloadError("no network")

    monkeypatch.setattr(app.data.datasets, "download", no_network)
    cfg.trainer.epochs, original = 2, cfg.data
    cfg.data = dataclasses.replace(original, root=str(tmp_path / "nothing"))
    whole = train(cfg)
    assert (whole["dataset"], whole["fallback_from"]) == ("digits", "mnist")
    stop_at(monkeypatch, "take", 50)
    with pytest.raises(StoppedError):
        train(cfg)
    monkeypatch.undo()
    digits = dataclasses.replace(original, name="digits", val_size=60)
    resumed = dataclasses.replace(cfg, resume="latest", data=digits)
    for typed in ({"data": "data=digits"}, {}):  # the second time the run is finished
        summary = train(resumed, typed)
        assert (summary["dataset"], summary["fallback_from"]) == ("digits", "mnist")
    assert_same(*folders(cfg.outputs))


def test_resume_accepts_other_device_and_compile_settings(cfg, stopped):
    trainer = dataclasses.replace(cfg.trainer, compile=False, checkpoint_seconds=5.0)
    asked, typed = dataclasses.replace(cfg, trainer=trainer, device="auto"), {}
    assert load_config(stopped, asked, None, typed).device == "cpu"
    for override in ("device=auto", "trainer.compile=false", "trainer.checkpoint_seconds=5"):
        typed[override.partition("=")[0]] = override
    kept = load_config(stopped, asked, None, typed)
    assert (kept.trainer.compile, kept.trainer.checkpoint_seconds) == (False, 5.0)
    assert kept.device == "auto"
    asked.trainer.batch_size = 16
    typed["trainer.batch_size"] = "trainer.batch_size=16"
    with pytest.raises(UserError, match=r"batch_size=16: the run to resume has .*batch_size=32"):
        load_config(stopped, asked, None, typed)


def test_resume_locks_before_reading(cfg, stopped, monkeypatch):
    def read(*arguments):
        with pytest.raises(UserError, match="going on in another process"), locked(stopped):
            pass
        raise StoppedError

    monkeypatch.setattr(app.training.state, "load_checkpoint", read)
    with pytest.raises(StoppedError):
        train(dataclasses.replace(cfg, resume="latest"))


def test_predict_and_resume_find_the_same_newest_run(cfg, stopped):
    other = create_run_folder(cfg)
    (other / "best.pt").write_bytes((stopped / "best.pt").read_bytes())
    os.utime(other / "best.pt", (1e9, 1e9))
    assert find_run("latest", cfg.outputs) == find_checkpoint(cfg.outputs).parent == other


def test_checkpoint_of_an_older_version_raises(cfg, stopped):
    checkpoint = load_checkpoint(stopped / "last.pt")
    checkpoint.training |= {"logs": {}, "learner": checkpoint.training.pop("state")}
    save_checkpoint(stopped / "last.pt", checkpoint)
    with pytest.raises(UserError, match=r"last\.pt: written by an older version, which cannot"):
        train(dataclasses.replace(cfg, resume="latest"))


def test_resume_after_sigkill_is_bitwise_equal(tmp_path, request):
    """Kill and resume `--kills` runs at random times."""
    settings = ["data=digits", "trainer.epochs=3", "trainer.batch_size=32", "model.act=gelu"]
    settings += ["trainer.checkpoint_steps=7", "optim.ema=0.9", "augment.rotation=10"]
    started = time.monotonic()
    assert run(*settings, "outputs=whole", folder=tmp_path)[0] == 0
    seconds, (whole,) = time.monotonic() - started, folders(tmp_path / "whole")
    for number in range(request.config.getoption("--kills")):
        outputs = f"outputs={number}"
        process = command(*settings, outputs, folder=tmp_path)
        while not process.stdout.readline().startswith("writing to"):
            assert process.poll() is None, process.stderr.read()
        time.sleep(random.uniform(0, 0.5 * seconds))
        process.kill()
        process.communicate()
        code, output, errors = run("resume=latest", outputs, folder=tmp_path)
        assert (code, errors) == (0, "")
        print(f"kill {number}: {output.splitlines()[:3][-1]}")  # a finished run prints one line
        assert_same(whole, *folders(tmp_path / str(number)))
