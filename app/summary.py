import json
from typing import Any

import torch

from app.config import choices_of
from app.device import describe
from app.files import write_atomically
from app.model import count_parameters, describe_model
from app.runs import SUMMARY
from app.state import BEST, Run


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
