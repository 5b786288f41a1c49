"""Test the best checkpoint of a run, log pictures and results, write summary.json."""

import dataclasses
import json
import sys
from typing import Any

import torch
from torch import Tensor

from app.config.device import describe
from app.config.errors import one_line
from app.config.schema import counted
from app.inference.metrics import Predictions, score
from app.inference.predictor import predict_logits
from app.models import count_parameters, describe_model
from app.runs.checkpoint import BEST, load_checkpoint
from app.runs.files import write_atomically
from app.runs.folder import NON_HYPERPARAMETERS, SUMMARY, flatten
from app.runs.tracker import Tracker
from app.training.state import Run


def test(run: Run) -> tuple[Tensor, dict[str, Any]]:
    """Test `best.pt` on the test images; return logits, and loss and accuracy by name."""
    data = run.data
    model = load_checkpoint(run.folder / BEST).network.to(run.device)
    logits = predict_logits(model, data.test.images, data.mean, data.std)
    loss, accuracy = score(logits, data.test.labels)
    return logits, {"test_loss": loss, "test_accuracy": accuracy}


def log_results(run: Run, tracker: Tracker, logits: Tensor, results: dict[str, Any]) -> None:
    """Log the test, pictures of it, and settings and metrics for the HParams tab.

    On failure print a warning: `summary.json` has the results. It is written before, so that a run
    that is killed in between is not tested and logged again.
    """
    values = {"loss/test": results["test_loss"], "accuracy/test": results["test_accuracy"]}
    numbers = {f"final/{key}": value for key, value in (results | metrics(run)).items()}
    settings = {
        key: value for key, value in flatten(run.cfg).items() if key not in NON_HYPERPARAMETERS
    }
    predictions = Predictions.of(run.data.classes, run.data.test.labels, logits)
    try:
        tracker.scalars(run.step, values | numbers)
        tracker.settings(settings, numbers)
        from app.inference.plots import draw_confusion, draw_mistakes  # late: imports Pillow

        tracker.picture("confusion_matrix", draw_confusion(predictions), run.step)
        mistakes = draw_mistakes(predictions, run.data.test.images.cpu())
        tracker.picture("mistakes", mistakes, run.step)
        tracker.flush()
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        print(f"WARNING: results are missing in TensorBoard: {reason}", file=sys.stderr)


def metrics(run: Run) -> dict[str, Any]:
    """Return the metrics of a run except those of the test."""
    return {
        "val_accuracy": run.best if run.best >= 0 else None,
        "images_per_second": run.images / run.seconds if run.seconds else None,
        "training_seconds": run.seconds,
        "parameters": count_parameters(run.train_step.model),
    }


def summarize(run: Run, status: str, **results: Any) -> dict[str, Any]:
    """Write `summary.json`, one flat object for scripts, and return it."""
    data, cfg = run.data, run.cfg
    network = dataclasses.asdict(cfg.model)
    summary = {
        "status": status,
        **results,
        **metrics(run),
        "epochs": run.epoch,
        "total_epochs": run.schedule.epochs,
        "steps": run.step,
        "model": network.pop("name"),
        **network,
        "recipe": cfg.recipe,
        "precision": cfg.trainer.precision,
        "seed": cfg.seed,
        "dataset": data.name,
        "fallback_from": data.fallback_from,
        "train_size": len(data.train),
        "val_size": len(data.val),
        "test_size": len(data.test),
        "processes": run.world.size,
        "device": describe(run.device),
        "torch": str(torch.__version__),
    }
    write_atomically(run.folder / SUMMARY, json.dumps(summary, indent=2).encode())
    return summary


def format_summary(run: Run, summary: dict[str, Any]) -> str:
    """Format the results of a run: a table, and the test accuracy in the last line."""
    length = f"{counted(run.epoch, 'epoch')}, {counted(run.step, 'step')}"
    rows = {
        "test": f"{summary['test_accuracy']:.2%} accuracy, {summary['test_loss']:.4f} loss",
        "validation": f"{summary['val_accuracy']:.2%} accuracy, by which the checkpoint was chosen",
        "training": f"{length}, {run.seconds:.1f} s",
        "network": f"{summary['parameters']:,} parameters, {describe_model(run.cfg.model)}",
    }
    table = "\n".join(f"  {name:<12}{value}" for name, value in rows.items())
    return (
        f"{table}\ntest accuracy {summary['test_accuracy']:.2%} in {summary['seconds']:.1f} s, "
        f"{summary['images_per_second']:,.0f} images/s: {run.folder / BEST}"
    )


def describe_run(run: Run) -> str:
    """Describe data, network and folder in a line each; warn if a batch exceeds the data."""
    data, cfg, size = run.data, run.cfg, run.world.size
    if cfg.trainer.batch_size > len(data.train):
        note = f"only {len(data.train):,} training images, which make one batch"
        print(f"trainer.batch_size={cfg.trainer.batch_size}: {note}", file=sys.stderr)
    count = count_parameters(run.train_step.model)
    processes = f", {size} processes" if size > 1 else ""
    going_on = f"going on after step {run.step:,} in" if cfg.resume else "writing to"
    return (
        f"{data.name}: {len(data.train):,} training, {len(data.val):,} validation, "
        f"{len(data.test):,} test images\n"
        f"{describe_model(cfg.model)}: {count:,} parameters on {describe(run.device)}{processes}\n"
        f"{going_on} {run.folder}"
    )
