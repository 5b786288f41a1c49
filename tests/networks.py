"""Trained networks, shared by test files and pytest workers."""

import fcntl
import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA_ROOT = ROOT / "data"
HAS_MNIST = (DATA_ROOT / "MNIST" / "raw").is_dir()
KINDS = {
    f"{act}-{conv}": {"act": act, "conv": conv}
    for act, conv in product(("relu", "gelu", "ncrelu"), ("standard", "depthwise"))
} | {
    "gap": {"act": "ncrelu", "conv": "depthwise", "head": "gap"},
    "involution": {"act": "relu", "conv": "involution"},
    "lltm": {"name": "lltm"},
    "separable": {"name": "separable", "channels": [[16], [24, 24], [40, 48]]},
}


def common_folder(tmp_path_factory):
    """Return the folder shared by all pytest workers, or TRAINED_NETWORKS, which persists."""
    if kept := os.environ.get("TRAINED_NETWORKS"):
        return Path(kept)
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def folder_lock(folder):
    """Lock `folder` against other workers."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def train_once(folder, kind):
    """Return the run folder of a network; the first worker trains it.

    Args:
        folder: The result of `common_folder`.
        kind: A key of `KINDS`.

    It is trained on `small_mnist`, or on digits if MNIST is missing.
    """
    outputs = folder / f"trained-{kind}"
    outputs.mkdir(exist_ok=True)
    with folder_lock(outputs):
        if not any(outputs.rglob("best.pt")):
            _train(outputs, KINDS[kind], small_mnist(folder))
    (best,) = outputs.rglob("best.pt")
    return best.parent


def small_mnist(folder):
    """Return a data root with the first images of MNIST."""
    root = folder / "small-mnist"
    raw = root / "MNIST" / "raw"
    counts = {"train": 10_000, "t10k": 1000}
    with folder_lock(folder):
        for part, count in counts.items() if HAS_MNIST and not raw.is_dir() else ():
            raw.mkdir(parents=True, exist_ok=True)
            for name, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
                file = f"{part}-{name}-ubyte"
                content = (DATA_ROOT / "MNIST" / "raw" / file).read_bytes()
                kept = content[:4] + count.to_bytes(4, "big") + content[8 : header + count * size]
                (raw / file).write_bytes(kept)
    return root


def _train(outputs, model, data_root):
    import torch

    from app.config.schema import (
        DataConfig,
        ModelConfig,
        TrainConfig,
        TrainerConfig,
        from_mapping,
    )
    from app.training.trainer import train

    name, val_size = ("mnist", 1000) if HAS_MNIST else ("digits", 150)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several workers train at once
    train(
        TrainConfig(
            model=from_mapping(ModelConfig, {"name": "lenet"} | model),
            data=DataConfig(str(data_root), name, val_size=val_size),
            trainer=TrainerConfig(batch_size=64),  # enough steps for few images
            device="cpu",
            outputs=str(outputs),
        )
    )
    torch.set_num_threads(threads)
