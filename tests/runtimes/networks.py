"""Trained networks of every kind, exported in every layout, with reference logits."""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from tests.networks import HAS_MNIST, folder_lock, small_mnist, train_once

LAYOUTS = ("function", "standard", "int8")
IMAGES = 1000


@dataclass
class Case:
    """An exported network, images, and the original network's logits.

    Attributes:
        path: The file.
        images: Normalised, float32 [N, 1, 28, 28].
        logits: float32 [N, 10].
        labels: int64 [N].
    """

    path: Path
    images: np.ndarray
    logits: np.ndarray
    labels: np.ndarray

    @cached_property
    def accuracy(self):
        return accuracy(self.logits, self.labels)


def accuracy(logits, labels):
    return float((logits.argmax(1) == labels).mean())


def prepare(folder, kind, layout):
    """Return a network's case; the first worker trains and exports it.

    Args:
        folder: The result of `tests.networks.common_folder`.
        kind: A key of `tests.networks.KINDS`.
        layout: One of `LAYOUTS`.
    """
    from app.inference.predictor import load_torch

    root = small_mnist(folder)
    run = train_once(folder, kind)
    exported = folder / f"exported-{kind}"  # not in the run, which app.draw lists
    exported.mkdir(exist_ok=True)
    path, answers = exported / f"model-{layout}.onnx", exported / "expected.npz"
    original = load_torch(run)
    with folder_lock(exported):
        if not path.exists():
            path.write_bytes(_export(original, layout, str(root)))
        if not answers.exists():
            np.savez(answers, **_expected(original, str(root)))
    expected = dict(np.load(answers))
    return Case(path=path, **{item.name: expected[item.name] for item in fields(Case)[1:]})


def _export(original, layout, root):
    from app.config.schema import ExportConfig
    from app.export.export import check
    from app.export.graph import build_graph
    from app.export.quantize import quantize
    from app.inference.predictor import load_data

    model = build_graph(original, ExportConfig(layout=layout.replace("int8", "standard")))
    if layout != "int8":
        return check(model).SerializeToString()
    images = load_data(original.checkpoint, root).val.images
    model = check(quantize(model, original.normalize(images)))
    del model.graph.value_info[:]  # as export does
    return model.SerializeToString()


def _expected(original, root):
    import torch

    from app.inference.predictor import load_data

    data = load_data(original.checkpoint, root)
    splits = [data.test] if HAS_MNIST else [data.test, data.val, data.train]
    images = torch.cat([split.images for split in splits])[:IMAGES]
    return {
        "images": original.normalize(images).numpy(),
        "logits": original.logits(images).numpy(),
        "labels": torch.cat([split.labels for split in splits])[:IMAGES].numpy(),
    }
