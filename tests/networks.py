"""Networks that several test files use: trained once, for all of pytest's workers."""

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA_ROOT = ROOT / "data"
HAS_MNIST = (DATA_ROOT / "MNIST" / "raw").is_dir()


def common_folder(tmp_path_factory):
    """A folder that all workers of this pytest have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def exclusively(folder):
    """Keep the other workers out until the block ends."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def train_once(folder, name, model, **trainer):
    """Return the run folder of a network, trained by whichever worker comes first.

    Args:
        folder: As `common_folder` returns.
        name: Of the network.
        model: Fields of `ModelConfig`.
        trainer: Fields of `TrainerConfig`; none: the default recipe.
    """
    outputs = folder / f"trained-{name}"
    outputs.mkdir(exist_ok=True)
    with exclusively(outputs):
        if not any(outputs.rglob("best.pt")):
            _train(outputs, model, trainer)
    (best,) = outputs.rglob("best.pt")
    return best.parent


def _train(outputs, model, trainer):
    import torch

    from app.config.schema import DataConfig, ModelConfig, TrainConfig, TrainerConfig
    from app.training.trainer import train

    name, val_size = ("mnist", 5000) if HAS_MNIST else ("digits", 150)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several workers train at once
    train(
        TrainConfig(
            model=ModelConfig(**model),
            data=DataConfig(str(DATA_ROOT), name, val_size=val_size),
            trainer=TrainerConfig(**trainer),
            device="cpu",
            outputs=str(outputs),
        )
    )
    torch.set_num_threads(threads)
