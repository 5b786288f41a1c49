import dataclasses
import json
import math
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.nn import functional as F

import ops
from app.config.errors import RunError, UserError, WriteError
from app.config.schema import (
    DataConfig,
    LeNetConfig,
    LLTMConfig,
    OptimConfig,
    SeparableConfig,
    TrainConfig,
    TrainerConfig,
)
from app.data.datasets import load_dataset
from app.data.transforms import normalize
from app.inference import predictor as inference
from app.inference.predictor import evaluate
from app.models import build_model
from app.runs.checkpoint import load_checkpoint
from app.training import summary as final
from app.training import trainer as training
from app.training.optimizers import one_cycle
from app.training.step import Schedule
from app.training.trainer import train
from tests.app.idx import write_dataset
from tests.app.training.moments import after_step, before_step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cfg(tmp_path):
    """Return a configuration of two epochs of seven steps on an easy data set."""
    write_dataset(tmp_path / "data")
    return TrainConfig(
        model=LeNetConfig(act="ncrelu"),
        data=DataConfig(root=str(tmp_path / "data"), val_size=60),
        optim=OptimConfig("adamw", lr=0.01),
        trainer=TrainerConfig(epochs=2, batch_size=32, log_every=2),
        device="cpu",
        outputs=str(tmp_path / "outputs"),
    )


def run_folder(cfg):
    (summary,) = Path(cfg.outputs).rglob("summary.json")
    return summary.parent


def test_run_learns_and_writes_its_files(cfg, capfd):
    summary = train(cfg)
    folder = run_folder(cfg)
    assert summary["test_accuracy"] > 0.9
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (summary["status"], summary["epochs"], summary["steps"]) == ("finished", 2, 14)
    assert summary["parameters"] == 123_026
    names = {path.name.split(".")[0] for path in folder.iterdir() if path.name != ".hydra"}
    assert names == {"best", "last", "summary", "events"}
    output, errors = capfd.readouterr()
    assert errors == ""  # a pipe has no progress bar
    assert len([line for line in output.splitlines() if line.startswith("epoch ")]) == 2
    last = output.splitlines()[-1]
    assert last.startswith(f"test accuracy {summary['test_accuracy']:.2%} in ")
    assert str(folder / "best.pt") in last
    assert "images/s" in last


def test_tensorboard_curves(cfg):
    summary = train(cfg)
    events = EventAccumulator(str(run_folder(cfg))).Reload()
    steps = {tag: [p.step for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["loss/train"] == steps["learning_rate"] == [2, 4, 6, 7, 9, 11, 13, 14]
    assert steps["gradient_norm"] == steps["loss/train"]
    for tag in ("loss/val", "accuracy/val", "accuracy/train", "images_per_second"):
        assert steps[tag] == [7, 14]
    assert len(steps["accuracy/test"]) == len(steps["loss/test"]) == 1
    assert events.Scalars("accuracy/test")[0].value == pytest.approx(summary["test_accuracy"])
    rates = [point.value for point in events.Scalars("learning_rate")]
    assert rates == pytest.approx([one_cycle(s - 1, 14, cfg.optim) for s in steps["loss/train"]])
    assert set(events.Tags()["images"]) == {"confusion_matrix", "mistakes"}


def test_lltm_run(cfg, capsys):
    cfg.model = LLTMConfig()
    summary = train(cfg)
    assert summary["model"] == "lltm"
    assert not {"act", "conv", "head"} & summary.keys()
    assert summary["test_accuracy"] > 0.5
    assert "LLTM of 128 features" in capsys.readouterr().out


def test_separable_network_trains(cfg):
    network = SeparableConfig([[4], [4], [4]])
    assert train(dataclasses.replace(cfg, model=network))["channels"] == network.channels


def test_tensorboard_hparams(cfg):
    summary = train(cfg)
    events = EventAccumulator(str(run_folder(cfg))).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["model.act"].string_value == "ncrelu"
    assert start.hparams["optim.lr"].number_value == 0.01
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    metrics = HParamsPluginData.FromString(content).experiment.metric_infos
    names = {info.name.tag for info in metrics}
    assert "final/test_accuracy" in names
    assert names <= set(events.Tags()["scalars"])
    assert events.Scalars("final/parameters")[0].value == summary["parameters"]


def test_best_checkpoint_contents(cfg):
    summary = train(cfg)
    best = load_checkpoint(run_folder(cfg) / "best.pt")
    assert best.model_config == cfg.model
    assert best.config == dataclasses.asdict(cfg)
    assert best.metrics["val_accuracy"] == summary["val_accuracy"]
    data = load_dataset(cfg.data)
    assert dataclasses.asdict(best.data) == {
        "name": "mnist",
        "classes": list("0123456789"),
        "mean": data.mean,
        "std": data.std,
        "fallback_from": None,
        "val_size": 60,
        "split_seed": 0,
    }
    loss, accuracy = evaluate(best.network, data.test, data)
    assert accuracy == summary["test_accuracy"]
    assert loss == pytest.approx(summary["test_loss"], rel=1e-4)


def test_best_checkpoint_is_selected_by_validation(cfg, monkeypatch):
    cfg.trainer.epochs = 4
    accuracies = iter([(0.9, 0.3), (0.5, 0.8), (0.4, 0.8), (0.6, 0.7), (0.1, 0.75)])
    used = []

    def scripted(logits, labels):
        used.append(len(labels))
        return next(accuracies)

    monkeypatch.setattr(inference, "score", scripted)
    monkeypatch.setattr(final, "score", scripted)
    summary = train(cfg)
    assert used == [60, 60, 60, 60, 100]
    best = load_checkpoint(run_folder(cfg) / "best.pt").metrics
    assert (best["epoch"], best["val_accuracy"]) == (3, 0.8)  # the later epoch of equal ones
    assert (summary["val_accuracy"], summary["test_accuracy"]) == (0.8, 0.75)
    assert load_checkpoint(run_folder(cfg) / "last.pt").metrics["epoch"] == 4


def test_signal_in_the_last_step_interrupts(cfg, monkeypatch):
    after_step(monkeypatch, 13, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        train(cfg)
    folder = run_folder(cfg)
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert load_checkpoint(folder / "last.pt").metrics["epoch"] == cfg.trainer.epochs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_writes_checkpoint_and_summary(cfg, monkeypatch, capsys, number):
    before_step(monkeypatch, 9, lambda _: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        train(cfg)
    folder = run_folder(cfg)
    assert load_checkpoint(folder / "last.pt").metrics == {"epoch": 1, "step": 10}
    assert load_checkpoint(folder / "best.pt").metrics["epoch"] == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 10)
    assert "test_accuracy" not in summary
    assert "stopped after step 10" in capsys.readouterr().out


def test_summary_of_a_run_that_goes_on_has_its_settings(cfg, monkeypatch):
    def read(_):
        summaries.append(json.loads((run_folder(cfg) / "summary.json").read_text()))

    summaries = []
    before_step(monkeypatch, 1, read)
    cfg.trainer.epochs = None
    finished = train(cfg)
    (summary,) = summaries
    assert (summary["status"], summary["epochs"]) == ("unfinished", 0)
    for key in ("dataset", "val_size", "total_epochs"):
        assert summary[key] == finished[key]
    assert finished["total_epochs"] == finished["epochs"] > 2


def test_nonfinite_loss_raises(cfg, monkeypatch):
    after_step(monkeypatch, 10, lambda step: step.statistics[3].fill_(math.nan))
    with pytest.raises(
        RunError, match=r"the loss is nan at step 11, .* smaller optim\.lr"
    ) as error:
        train(cfg)
    (last,) = Path(cfg.outputs).rglob("last.pt")
    assert f"(last checkpoint: {last})" in str(error.value)
    assert json.loads((last.parent / "summary.json").read_text())["status"] == "failed"
    assert load_checkpoint(last).metrics["epoch"] == 1  # of finite weights


@pytest.mark.parametrize(
    ("lr", "decay", "setting"),
    [(0.008, 0.05, "lr"), (0.008, 1e6, "weight_decay"), (1e308, 0.05, "lr")],
)
def test_nonfinite_loss_names_the_likely_setting(cfg, monkeypatch, lr, decay, setting):
    cfg.optim.lr, cfg.optim.weight_decay = lr, decay
    after_step(monkeypatch, 3, lambda step: step.statistics[3].fill_(math.nan))
    with pytest.raises(RunError, match=rf"weight decay \S+: try a smaller optim\.{setting} \("):
        train(cfg)


def test_nonfinite_weights_are_not_saved(cfg, monkeypatch):
    start = training.start

    def spoiled(*arguments):
        result = start(*arguments)
        next(result.train_step.average.parameters())[0] = float("nan")
        return result

    monkeypatch.setattr(training, "start", spoiled)
    cfg.optim.ema, cfg.trainer.checkpoint_steps = 0.9, 2
    with pytest.raises(RunError, match="the weights are not finite at step 2"):
        train(cfg)
    assert not list(Path(cfg.outputs).rglob("last.pt"))


@pytest.mark.parametrize("name", ["empty", "operator"])
def test_out_of_memory_raises_run_error(cfg, monkeypatch, name):
    def allocate(_):
        element = torch.empty(1)
        element.new_empty(2**44) if name == "empty" else ops.exp(element.expand(2**44))

    before_step(monkeypatch, 10, allocate)
    reason = r"out of memory at step \d+ on cpu with trainer\.batch_size=32"
    with pytest.raises(RunError, match=reason):
        train(cfg)
    (last,) = Path(cfg.outputs).rglob("last.pt")
    assert load_checkpoint(last).metrics["epoch"] == 1


def test_out_of_memory_before_the_first_step(cfg, monkeypatch):
    def allocate(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(training, "start", allocate)
    with pytest.raises(RunError, match=r"^out of memory before the first step$"):
        train(cfg)


def test_full_disk_keeps_the_last_checkpoint(cfg, monkeypatch, limited_files):
    before_step(monkeypatch, 10, lambda _: stack.enter_context(limited_files()))
    with ExitStack() as stack, pytest.raises(RunError, match="cannot be written: File") as error:
        train(cfg)
    (last,) = Path(cfg.outputs).rglob("last.pt")
    assert f"too large (last checkpoint: {last})" in str(error.value)
    assert load_checkpoint(last).metrics["epoch"] == 1
    monkeypatch.undo()
    assert train(dataclasses.replace(cfg, resume="latest"))["steps"] == 14


def test_failed_picture_is_a_warning(cfg, monkeypatch, capsys):
    monkeypatch.setattr("app.inference.plots.FONT", None)
    summary = train(cfg)
    assert json.loads((run_folder(cfg) / "summary.json").read_text()) == summary
    assert summary["status"] == "finished"
    warning = "WARNING: results are missing in TensorBoard: AttributeError: 'NoneType' object has"
    assert capsys.readouterr().err.startswith(warning)
    tags = EventAccumulator(str(run_folder(cfg))).Reload().Tags()
    assert "accuracy/test" in tags["scalars"]


def test_message_names_best_where_last_could_not_be_written(cfg, monkeypatch):
    def fill_the_disk(*arguments, **metrics):
        raise WriteError("last.pt: cannot be written: No space left on device")

    monkeypatch.setattr(training, "save_last", fill_the_disk)
    with pytest.raises(RunError) as error:
        train(cfg)
    (best,) = Path(cfg.outputs).rglob("best.pt")
    assert str(error.value).endswith(f"No space left on device (last checkpoint: {best})")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("device", "cuda:99", "device=cuda:99: not on this machine, choose from auto, cpu"),
        ("data", DataConfig(name="digits", val_size=1438), "data.val_size=1438: must be below"),
        ("outputs", "a-file/outputs", "outputs=a-file/outputs: cannot be written: Not a directory"),
    ],
)
def test_usage_error_writes_no_files(cfg, tmp_path, monkeypatch, key, value, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    setattr(cfg, key, value)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        train(cfg)
    assert message in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_batch_size_is_limited_to_the_data(cfg):
    cfg.trainer.batch_size = 10_000
    schedule = Schedule(cfg, images=240, processes=1)
    assert (schedule.batch_size, schedule.steps) == (240, 2)
    assert Schedule(cfg, images=241, processes=2).batch_size == 240


def test_batch_size_above_the_data_is_reported(cfg, capsys):
    cfg.trainer.batch_size, cfg.trainer.epochs = 10_000, 1
    train(cfg)
    note = "trainer.batch_size=10000: only 240 training images, which make one batch\n"
    assert capsys.readouterr().err == note


def test_evaluate_does_not_depend_on_batch_size(cfg, monkeypatch):
    monkeypatch.setattr("app.inference.predictor.BATCH_SIZE", 33)
    data = load_dataset(cfg.data)
    model = build_model(cfg.model, 10)
    logits = model(normalize(data.test.images, data.mean, data.std))
    accuracy = (logits.argmax(1) == data.test.labels).float().mean().item()
    loss = F.cross_entropy(logits, data.test.labels).item()
    assert evaluate(model, data.test, data) == pytest.approx((loss, accuracy))
    assert not model.training


@pytest.mark.cuda
def test_on_a_gpu(cfg):
    cfg.device = "cuda"
    summary = train(cfg)
    assert summary["test_accuracy"] > 0.9
    weights = load_checkpoint(run_folder(cfg) / "best.pt").model
    assert all(tensor.device.type == "cpu" for tensor in weights.values())


def test_best_checkpoint_has_ema_weights(cfg):
    cfg.optim.ema = 0.9
    train(cfg)
    data = load_dataset(cfg.data)
    best, last = (load_checkpoint(run_folder(cfg) / name) for name in ("best.pt", "last.pt"))
    loss, accuracy = evaluate(best.network, data.val, data)
    assert (loss, accuracy) == (best.metrics["val_loss"], best.metrics["val_accuracy"])
    state = last.training["state"]
    assert all(torch.equal(last.model[key], value) for key, value in state["average"].items())
    assert not all(torch.equal(last.model[key], value) for key, value in state["model"].items())


def test_validation_uses_ema_weights(cfg, monkeypatch):
    cfg.optim.ema, validated = 0.9, []

    def recorded(model, *arguments):
        validated.append([parameter.clone() for parameter in model.parameters()])
        return evaluate(model, *arguments)

    monkeypatch.setattr(training, "evaluate", recorded)
    train(cfg)
    last = load_checkpoint(run_folder(cfg) / "last.pt")
    average = list(last.training["state"]["average"].values())
    assert all(map(torch.equal, validated[-1], average))
