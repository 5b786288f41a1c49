import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.config import PredictConfig
from app.data import Split
from app.device import pick_device
from app.errors import UserError
from app.figures import COLUMNS, Tile, draw_grid
from app.files import write_atomically
from app.images import find_images, read_gray, to_digit
from app.inference import TrainedModel, load_test_split, load_trained, torch_runner

TILES = 10 * COLUMNS  # images in predictions.png


@dataclass
class Predictions:
    """What a model makes of labelled images.

    Attributes:
        classes: What the labels 0, 1, ... stand for.
        labels: The truth, int64 [N].
        predicted: The most probable class, int64 [N].
        confidence: Its probability, float32 [N].
    """

    classes: list[str]
    labels: Tensor
    predicted: Tensor
    confidence: Tensor

    @property
    def mistakes(self) -> Tensor:
        """Bool [N]."""
        return self.predicted != self.labels

    @property
    def confusion(self) -> Tensor:
        """How many images of each class (row) were taken for each class (column), int64 [C, C]."""
        count = len(self.classes)
        pairs = self.labels * count + self.predicted
        return torch.bincount(pairs, minlength=count * count).view(count, count)


def predict(cfg: PredictConfig) -> None:
    """Predict as `cfg` says: the pictures that `input` names or, without, the test split.

    Raises:
        UserError: The checkpoint, the pictures, the data or the device cannot be used.
        RunError: The results cannot be written.
    """
    device = pick_device(cfg.device)
    if cfg.input is not None:
        paths, digits = read_digits(cfg.input, cfg.invert)
        trained = load_trained(cfg.checkpoint, cfg.outputs)
        print_pictures(paths, *classify(trained, digits, device), trained.classes)
        return
    trained = load_trained(cfg.checkpoint, cfg.outputs)
    split = load_test_split(trained.checkpoint, cfg.data.root)
    predicted, confidence = classify(trained, split.images, device)
    predictions = Predictions(trained.classes, split.labels, predicted, confidence)
    data = trained.checkpoint.data
    instead = f" (instead of {data['fallback_from']})" if data["fallback_from"] else ""
    name = data["name"] + instead
    print(f"{describe(predictions, name)}\n\n{format_confusion(predictions)}\n")
    for file, content in (
        ("predictions.csv", to_csv(predictions).encode()),
        ("predictions.png", draw(predictions, split, name)),
    ):
        write_atomically(trained.folder / file, content)
        print(f"wrote {trained.folder / file}")


def classify(trained: TrainedModel, images: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The most probable class of each image uint8 [N, 1, 28, 28], int64 [N], and how probable."""
    confidence, predicted = torch_runner(trained, device)(images).softmax(1).max(1)
    return predicted, confidence


def read_digits(pattern: str, invert: bool | None) -> tuple[list[Path], Tensor]:
    """Read the pictures that a file, folder or glob pattern names, as images uint8 [N, 1, 28, 28].

    Raises:
        UserError: There are none, one of them cannot be read, or one is blank.
    """
    paths, digits = find_images(pattern), []
    for path in paths:
        digit = to_digit(read_gray(path), invert)
        if digit is None:
            raise UserError(f"input={path}: a blank picture, there is no digit in it")
        digits.append(digit)
    return paths, torch.from_numpy(np.stack(digits)).unsqueeze(1)


def print_pictures(
    paths: list[Path], predicted: Tensor, confidence: Tensor, classes: list[str]
) -> None:
    """Print a line for each picture: file, class, probability."""
    width = max(len(str(path)) for path in paths)
    for path, label, probability in zip(paths, predicted, confidence, strict=True):
        print(f"{path!s:{width}}  {classes[label]}  {probability:7.2%}")


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


def to_csv(predictions: Predictions) -> str:
    """A line for each image, in the order of the split: index, label, predicted, probability."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", "label", "predicted", "probability"])
    names = predictions.classes
    columns = (predictions.labels, predictions.predicted, predictions.confidence)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for index, (label, predicted, probability) in enumerate(rows):
        writer.writerow([index, names[label], names[predicted], f"{probability:.6f}"])
    return text.getvalue()


def draw(predictions: Predictions, split: Split, name: str) -> bytes:
    """A PNG of the mistakes, the surest first, and then of the least sure of the right ones."""
    wrong, confidence = predictions.mistakes, predictions.confidence
    order = torch.where(wrong, -1 - confidence, confidence).argsort()[:TILES]
    tiles = []
    for index in order.tolist():
        label, predicted = predictions.labels[index], predictions.predicted[index]
        image: NDArray[np.uint8] = split.images[index, 0].numpy()
        caption = f"{predictions.classes[predicted]} ({confidence[index]:.0%})"
        tiles.append(Tile(image, caption, predictions.classes[label] if wrong[index] else None))
    png = io.BytesIO()
    draw_grid(describe(predictions, name), tiles).save(png, "PNG", optimize=True)
    return png.getvalue()
