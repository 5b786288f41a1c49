"""State of a resumed run: best.pt, threads; order of writing on the disk."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

import app.config.device
from app.config.errors import UserError
from app.runs.checkpoint import load_checkpoint, save_checkpoint
from app.runs.folder import find_runs, locked
from app.training import summary as final
from app.training import trainer as training
from app.training.trainer import train
from tests.app.training.moments import before_step
from tests.app.training.test_resume import StoppedError, cfg, stop_at, stopped  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


def resumed(cfg, folder):  # noqa: F811
    return train(dataclasses.replace(cfg, resume=str(folder)))


@pytest.mark.parametrize("damaged", [False, True])
def test_resume_checks_the_best_checkpoint(cfg, stopped, monkeypatch, damaged):  # noqa: F811
    best = stopped / "best.pt"
    best.write_bytes(best.read_bytes()[:-999]) if damaged else best.unlink()
    before_step(monkeypatch, 0, lambda _: pytest.fail("trained before the check"))
    with pytest.raises(UserError, match=r"^resume=.*best\.pt") as error:
        resumed(cfg, stopped)
    remedy = "; restore it, or copy last.pt to best.pt to go on with the network of last.pt"
    assert str(error.value).endswith(remedy)
    monkeypatch.undo()
    shutil.copy(stopped / "last.pt", best)
    summary = resumed(cfg, stopped)
    assert summary["val_accuracy"] == load_checkpoint(best).metrics["val_accuracy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "12"}, "step must be of type int"),
        ({"best": None}, "best must be of type float"),
        ({"step": 3}, "step, epoch and points disagree"),
        ({"points": torch.zeros(3, 2)}, "step, epoch and points disagree"),
        ({"points": 3}, "'int' object has no attribute 'shape'"),
    ],
    ids=str,
)
def test_wrong_values_are_a_line(cfg, stopped, change, message):  # noqa: F811
    checkpoint = load_checkpoint(stopped / "last.pt")
    checkpoint.training.update(change)
    save_checkpoint(stopped / "last.pt", checkpoint)
    with pytest.raises(UserError, match=rf"last\.pt: its contents do not fit: {message}$"):
        resumed(cfg, stopped)


def test_copied_checkpoint_finishes_a_trained_run(cfg, monkeypatch):  # noqa: F811
    """Although no later epoch can be as good as the lost checkpoint."""
    accuracies = iter([0.9, 0.5, 0.4])
    monkeypatch.setattr(training, "evaluate", lambda *_: (1.0, next(accuracies)))
    stop_at(monkeypatch, "test", 1)
    with pytest.raises(StoppedError):
        train(cfg)
    monkeypatch.undo()
    (folder,) = find_runs(Path(cfg.outputs))
    shutil.copy(folder / "last.pt", folder / "best.pt")
    assert resumed(cfg, folder)["val_accuracy"] == 0.4


def test_number_of_threads_is_restored(cfg, stopped, monkeypatch):  # noqa: F811
    """The number of threads affects the last bits of the weights."""
    assert load_checkpoint(stopped / "last.pt").training["threads"] == 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(app.config.device, "fastest_threads", lambda most: most)
    torch.set_num_threads(2)
    counts = []
    before_step(monkeypatch, 0, lambda _: counts.append(torch.get_num_threads()))
    resumed(cfg, stopped)
    assert counts == [1]


def test_new_run_is_locked(cfg, monkeypatch):  # noqa: F811
    def lock_again(_):
        (folder,) = find_runs(Path(cfg.outputs))
        with pytest.raises(UserError, match="going on in another process"), locked(folder):
            pass
        locks.append(folder)

    locks = []
    before_step(monkeypatch, 3, lock_again)
    train(cfg)
    assert len(locks) == 1


def test_curves_are_synced_before_the_checkpoint(cfg, monkeypatch):  # noqa: F811
    synced, saved = {}, []

    def sync(file):
        fsync(file)
        status = os.fstat(file)
        synced[status.st_ino] = status.st_size

    def checked(run, name, **metrics):
        if name == "last.pt":
            for status in map(Path.stat, run.folder.glob("events.*")):
                assert synced[status.st_ino] == status.st_size
            saved.append(run.step)
        save(run, name, **metrics)

    fsync, save = os.fsync, training.save
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(training, "save", checked)
    train(cfg)
    assert saved[-1] > saved[0]


def test_final_test_uses_the_best_checkpoint(cfg, monkeypatch):  # noqa: F811
    accuracies = iter([0.5, 0.9, 0.4])
    monkeypatch.setattr(training, "evaluate", lambda *_: (1.0, next(accuracies)))
    tested = []

    def predict(model, *arguments):
        tested.append({name: value.clone() for name, value in model.state_dict().items()})
        return predict_logits(model, *arguments)

    predict_logits = final.predict_logits
    monkeypatch.setattr(final, "predict_logits", predict)
    train(cfg)
    (folder,) = find_runs(Path(cfg.outputs))
    best, last = (load_checkpoint(folder / name) for name in ("best.pt", "last.pt"))
    assert (best.metrics["epoch"], last.metrics["epoch"]) == (2, 3)
    torch.testing.assert_close(tested, [best.model], rtol=0, atol=0)
    assert not torch.equal(*(next(iter(it.model.values())) for it in (best, last)))
