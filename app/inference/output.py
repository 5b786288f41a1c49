"""Logic of `python -m app.predict`: predictions as table, CSV, JSON and predictions.png."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from app.config.errors import UserError, check_writable
from app.config.schema import PredictConfig, format_value, printable
from app.data.datasets import load_test_split
from app.inference.image_io import Gray, list_pictures, read_gray
from app.inference.metrics import Predictions
from app.inference.plots import draw_predictions
from app.inference.predictor import Predictor, load_predictor
from app.inference.preprocess import SIDE, bright_on_black, frame
from app.models import MIN_SIDE
from app.runs.files import csv_text, write_atomically
from app.runs.folder import data_root


def predict(cfg: PredictConfig) -> None:
    """Predict the pictures that `input` names; without `input`, the test images."""
    for key in ("frame", "invert"):
        value = getattr(cfg, key)
        if cfg.input is None and value != getattr(PredictConfig(), key):
            raise UserError(
                f"{key}={format_value(value)}: is for pictures, name them with input=..."
            )
    predictor = load_predictor(cfg.checkpoint, cfg.outputs, cfg.runtime, cfg.device)
    if cfg.input is None:
        predict_test_images(predictor, cfg)
    else:
        predict_pictures(predictor, cfg)


def predict_test_images(predictor: Predictor, cfg: PredictConfig) -> None:
    """Print accuracy and confusion matrix; write predictions.csv and predictions.png."""
    split = load_test_split(predictor.data.name, data_root(predictor.folder, cfg.data.root))
    logits = predictor.logits(split.images)
    predictions = Predictions.of(predictor.data.classes, split.labels, logits)
    data = predictor.data
    instead = f" (instead of {data.fallback_from})" if data.fallback_from else ""
    accuracy = f"{data.name}{instead} test: {accuracy_line(predictions)}"
    table = to_csv(predictions)
    text = f"{accuracy}\n\n{format_confusion(predictions)}\n\n"
    if cfg.format != "table":
        text = table if cfg.format == "csv" else to_json(predictions, predictor.data.name) + "\n"
    print(text, end="", flush=True)  # first, as the rest may fail
    picture = draw_predictions(predictions, split.images, accuracy)
    check_writable(predictor.folder, str(predictor.folder))
    for name, content in (("predictions.csv", table.encode()), ("predictions.png", picture)):
        write_atomically(predictor.folder / name, content)
        log = sys.stdout if cfg.format == "table" else sys.stderr  # keeps CSV and JSON parseable
        print(f"wrote {predictor.folder / name}", file=log)


def predict_pictures(predictor: Predictor, cfg: PredictConfig) -> None:
    """Print predictions for pictures; raise a UserError at the end if any was skipped."""
    names, images, skipped = [], [], []
    for name, file in list_pictures(str(cfg.input)):
        try:
            images.append(_prepare(read_gray(file), predictor, cfg))
            names.append(name)
        except UserError as error:
            source = name if isinstance(file, Path) else f"{name} (standard input)"
            skipped.append(f"input={source}: {error}")
    if not names and len(skipped) == 1:
        raise UserError(skipped[0])
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    if names:
        batches = [torch.stack(images)] if cfg.frame else [image[None] for image in images]
        probabilities = torch.cat([predictor.logits(batch) for batch in batches]).softmax(1)
        text = format_pictures(names, probabilities, predictor.data.classes, cfg.format)
        print(text, end="", flush=True)
    if skipped:
        count = f"{len(skipped)} of {len(skipped) + len(names)} pictures"
        raise UserError(f"input={cfg.input}: skipped {count}")


def _prepare(gray: Gray, predictor: Predictor, cfg: PredictConfig) -> Tensor:
    """Return a picture as image uint8 [1, H, W]; raise a UserError if blank or of a wrong size."""
    if cfg.frame:
        image = frame(gray, predictor.data.name, cfg.invert)
    else:
        height, width = gray.shape
        allowed, fits = f"{SIDE}x{SIDE}", gray.shape == (SIDE, SIDE)
        if predictor.any_size:
            allowed, fits = f"at least {MIN_SIDE}x{MIN_SIDE}", min(gray.shape) >= MIN_SIDE
        if not fits:
            raise UserError(
                f"{width}x{height} pixels; with frame=false this network takes {allowed}"
            )
        image = bright_on_black(gray, cfg.invert)
    if image is None:
        if cfg.invert is None:
            raise UserError("a blank picture, or no digit in it")
        setting = f"invert={format_value(cfg.invert)}"
        raise UserError(f"no digit found with {setting}, leave out {setting}")
    return image


def accuracy_line(predictions: Predictions) -> str:
    """Format accuracy, number of images and number of mistakes."""
    count, wrong = len(predictions.labels), int(predictions.mistakes.sum())
    return f"{1 - wrong / count:.2%} of {count:,} images right, {wrong:,} wrong"


def format_confusion(predictions: Predictions) -> str:
    """Format the confusion matrix: rows are true classes, columns predictions."""
    names = [name[:8] for name in predictions.classes]
    counts = [[f"{count:,}" if count else "." for count in row] for row in predictions.confusion]
    width = max(len(cell) for row in [names, *counts] for cell in row) + 2
    lines = [f"{'is':<8}" + "".join(f"{name:>{width}}" for name in names) + "  <- predicted"]
    for name, row in zip(names, counts, strict=True):
        lines.append(f"{name:<8}" + "".join(f"{cell:>{width}}" for cell in row))
    return "\n".join(lines)


def format_pictures(
    names: Sequence[str], probabilities: Tensor, classes: list[str], format: str
) -> str:
    """Format the predictions for pictures as "table", "csv" or "json" (with all probabilities)."""
    confidence, predicted = probabilities.max(1)
    labels = [classes[index] for index in predicted]
    rows = list(zip(names, labels, confidence.tolist(), strict=True))
    if format == "csv":
        text = ((name, label, f"{share:.6f}") for name, label, share in rows)
        return csv_text(("file", "predicted", "probability"), text)
    if format == "table":
        rows = [(printable(name), *rest) for name, *rest in rows]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "".join(
            f"{name:{widths[0]}}  {label:{widths[1]}}  {share:7.2%}\n"
            for name, label, share in rows
        )
    items = []
    for (name, label, share), every in zip(rows, probabilities.tolist(), strict=True):
        named = {key: round(value, 6) for key, value in zip(classes, every, strict=True)}
        item = {"file": name, "predicted": label, "probability": round(share, 6)}
        items.append(item | {"probabilities": named})
    return json.dumps(items, ensure_ascii=False, indent=1) + "\n"


def to_csv(predictions: Predictions) -> str:
    """Return CSV with one line per image, in the order of the test images."""
    names = predictions.classes
    columns = (predictions.labels, predictions.predicted, predictions.confidence)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return csv_text(
        ("index", "label", "predicted", "probability"),
        (
            (index, names[label], names[predicted], f"{share:.6f}")
            for index, (label, predicted, share) in enumerate(rows)
        ),
    )


def to_json(predictions: Predictions, dataset: str) -> str:
    """Return accuracy and confusion matrix (a list per true class) as JSON."""
    count, wrong = len(predictions.labels), int(predictions.mistakes.sum())
    values = {
        "dataset": dataset,
        "images": count,
        "wrong": wrong,
        "accuracy": 1 - wrong / count,
        "classes": predictions.classes,
        "confusion": predictions.confusion.tolist(),
    }
    return json.dumps(values, ensure_ascii=False)
