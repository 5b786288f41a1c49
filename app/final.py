"""What is done once, at the end of a run: the test, and what can be seen of the network."""

from typing import Any

import torch
from torch import Tensor, nn

from app.boards import draw_confusion, draw_filters, draw_mistakes
from app.checkpoint import load_checkpoint, load_model, save_checkpoint
from app.evaluation import predict_logits, score
from app.model import count_parameters
from app.results import Predictions
from app.runs import FREE, flatten, idle
from app.state import BEST, Run
from app.tracking import Tracker


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
