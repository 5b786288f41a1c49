"""The end of a run: test of the best checkpoint, pictures, and summary.json."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from app.config.device import describe
from app.config.schema import choices_of
from app.inference.metrics import Predictions, score
from app.inference.plots import draw_confusion, draw_filters, draw_mistakes
from app.inference.predictor import predict_logits
from app.models import count_parameters, describe_model
from app.runs.checkpoint import load_checkpoint, load_model, save_checkpoint
from app.runs.files import write_atomically
from app.runs.folder import FREE, SUMMARY, flatten, idle
from app.runs.tracker import Tracker
from app.training.state import BEST, Run


def test(run: Run, tracker: Tracker) -> dict[str, Any]:
    """Use the test images, once: on `best.pt`, in which the results are noted too."""
    best, data = load_checkpoint(run.folder / BEST), run.data
    model = load_model(best).to(run.device)
    logits = predict_logits(model, data.test.images, data.mean, data.std)
    loss, accuracy = score(logits, data.test.labels)
    results = {"test_loss": loss, "test_accuracy": accuracy}
    best.metrics |= results
    save_checkpoint(run.folder / BEST, best)
    step = best.metrics["step"]
    tracker.scalars(step, {"loss/test": loss, "accuracy/test": accuracy})
    log_pictures(run, tracker, step, model, logits)
    return results


def log_pictures(run: Run, tracker: Tracker, step: int, model: nn.Module, logits: Tensor) -> None:
    """Add what can be seen of a network, and of its logits for the test images."""
    data = run.data
    labels, probabilities = data.test.labels.cpu(), logits.softmax(1).cpu()
    confidence, predicted = probabilities.max(1)
    predictions = Predictions(list(data.classes), labels, predicted, confidence)
    filters = draw_filters(model)
    if filters is not None:
        tracker.picture(step, "first_convolution", filters)
    tracker.picture(step, "confusion_matrix", draw_confusion(predictions))
    tracker.picture(step, "mistakes", draw_mistakes(predictions, data.test.images.cpu()))
    tracker.precision_recall(step, data.classes, labels, probabilities)
    tracker.graph(model.cpu(), torch.zeros(1, 1, 28, 28))


def log_results(run: Run, tracker: Tracker, results: dict[str, Any]) -> None:
    """Add the run's settings and final numbers, by which TensorBoard compares a sweep."""
    numbers = {
        "final/test_accuracy": results["test_accuracy"],
        "final/test_loss": results["test_loss"],
        "final/val_accuracy": run.best,
        "final/parameters": count_parameters(run.learner.model),
        "final/training_seconds": run.seconds,
        "final/images_per_second": run.images / run.seconds,
    }
    tracker.scalars(run.step, numbers)
    settings = flatten(run.cfg)
    settings = {key: settings[key] for key in settings if key not in {*FREE, *idle(settings)}}
    tracker.settings(settings, numbers)


def summarize(run: Run, status: str, **results: Any) -> dict[str, Any]:
    """Write `summary.json`, one flat object that scripts can read, and return it."""
    data, cfg = run.data, run.cfg
    summary = {
        "status": status,
        **results,
        "val_accuracy": run.best if run.best >= 0 else None,
        "images_per_second": run.images / run.seconds if run.seconds else None,
        "training_seconds": run.seconds,
        "epochs": run.epoch,
        "steps": run.step,
        "parameters": count_parameters(run.learner.model),
        "model": cfg.model.name,
        **{key: getattr(cfg.model, key) for key in choices_of(cfg.model.name)},
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
    """The end of a run in a small table, and its most important line."""
    epochs = f"{run.epoch} epoch{'s' if run.epoch > 1 else ''}"
    rows = {
        "test": f"{summary['test_accuracy']:.2%} accuracy, {summary['test_loss']:.4f} loss",
        "validation": f"{summary['val_accuracy']:.2%} accuracy, by which the checkpoint was chosen",
        "training": f"{epochs}, {run.step:,} steps, {run.seconds:.1f} s",
        "network": f"{summary['parameters']:,} parameters, {describe_model(run.cfg.model)}",
    }
    table = "\n".join(f"  {name:<12}{value}" for name, value in rows.items())
    return (
        f"{table}\ntest accuracy {summary['test_accuracy']:.2%} in {summary['seconds']:.1f} s, "
        f"{summary['images_per_second']:,.0f} images/s: {run.folder / BEST}"
    )


def introduction(run: Run) -> str:
    """What the run is, in a few lines."""
    data, cfg, size = run.data, run.cfg, run.world.size
    processes = f", {size} processes" if size > 1 else ""
    going_on = f"going on after step {run.step:,} in" if cfg.resume else "writing to"
    return (
        f"{data.name}: {len(data.train):,} training, {len(data.val):,} validation, "
        f"{len(data.test):,} test images\n"
        f"{describe_model(cfg.model)}: "
        f"{count_parameters(run.learner.model):,} parameters on {describe(run.device)}{processes}\n"
        f"{going_on} {run.folder}"
    )
