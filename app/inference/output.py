"""Predictions as text: tables, CSV and JSON."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from app.inference.metrics import Predictions


def describe(predictions: Predictions, name: str) -> str:
    """Accuracy in a sentence."""
    count, wrong = len(predictions.labels), int(predictions.mistakes.sum())
    return f"{name} test: {1 - wrong / count:.2%} of {count:,} images right, {wrong:,} wrong"


def format_confusion(predictions: Predictions) -> str:
    """The confusion matrix as a table: a row for each class, a column for each prediction."""
    names = [name[:8] for name in predictions.classes]
    counts = [[f"{count:,}" if count else "." for count in row] for row in predictions.confusion]
    width = max(len(cell) for row in [names, *counts] for cell in row) + 2
    head = "".join(f"{name:>{width}}" for name in names)
    label = "is"
    lines = [f"{label:<8}{head}  <- predicted"]
    for name, row in zip(names, counts, strict=True):
        lines.append(f"{name:<8}" + "".join(f"{cell:>{width}}" for cell in row))
    return "\n".join(lines)


def print_pictures(
    names: Sequence[str], probabilities: Tensor, classes: list[str], format: str
) -> None:
    """Print what pictures were taken for.

    Args:
        names: Of the pictures.
        probabilities: float32 [N, classes].
        classes: What the columns stand for.
        format: "table" (file, class, probability), "csv" (with a heading) or "json" (a list, with
            the probabilities of all classes).
    """
    confidence, predicted = probabilities.max(1)
    rows = list(
        zip(names, (classes[index] for index in predicted), confidence.tolist(), strict=True)
    )
    if format == "json":
        print(
            _json_lines(
                {
                    "file": name,
                    "predicted": label,
                    "probability": round(probability, 6),
                    "probabilities": {
                        key: round(value, 6) for key, value in zip(classes, every, strict=True)
                    },
                }
                for (name, label, probability), every in zip(
                    rows, probabilities.tolist(), strict=True
                )
            )
        )
    elif format == "csv":
        text = [(name, label, f"{probability:.6f}") for name, label, probability in rows]
        print(_csv(("file", "predicted", "probability"), text), end="")
    else:
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, label, probability in rows:
            print(f"{name:{widths[0]}}  {label:{widths[1]}}  {probability:7.2%}")


def to_csv(predictions: Predictions) -> str:
    """A line for each image, in the order of the split: index, label, predicted, probability."""
    names = predictions.classes
    columns = (predictions.labels, predictions.predicted, predictions.confidence)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return _csv(
        ("index", "label", "predicted", "probability"),
        (
            (index, names[label], names[predicted], f"{probability:.6f}")
            for index, (label, predicted, probability) in enumerate(rows)
        ),
    )


def to_json(predictions: Predictions, name: str) -> str:
    """Accuracy and confusion matrix (a list for each class, an entry for each prediction)."""
    count, wrong = len(predictions.labels), int(predictions.mistakes.sum())
    values = {
        "dataset": name,
        "images": count,
        "wrong": wrong,
        "accuracy": 1 - wrong / count,
        "classes": predictions.classes,
        "confusion": predictions.confusion.tolist(),
    }
    return json.dumps(values, ensure_ascii=False)


def _json_lines(items: Iterable[dict[str, Any]]) -> str:
    """A JSON list with a line for each item."""
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    return f"[\n{lines}\n]"


def _csv(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()
