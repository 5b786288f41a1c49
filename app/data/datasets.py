import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from app.config.errors import UserError
from app.config.schema import DataConfig
from app.data.download import DownloadError, download


@dataclass
class Split:
    """Images uint8 [N, 1, 28, 28], 0 is background, and labels int64 [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Split":
        """The same split on `device`."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass
class Dataset:
    """A data set in memory.

    Attributes:
        name: As in `DataConfig.name`.
        classes: What the labels 0, 1, ... stand for.
        mean: Mean of the training pixels in [0, 1].
        std: Their standard deviation.
        train: Training part without the validation images.
        val: Held out of the training part, to choose a checkpoint by.
        test: To be used once, at the end.
        fallback_from: The data set that was asked for, when it could not be had.
    """

    name: str
    classes: tuple[str, ...]
    mean: float
    std: float
    train: Split
    val: Split
    test: Split
    fallback_from: str | None = None


@dataclass(frozen=True)
class _Source:
    """A data set of torchvision's: its class there, its IDX files, its classes."""

    torchvision: str
    train: tuple[str, str]
    test: tuple[str, str]
    classes: tuple[str, ...]


_DIGITS = tuple("0123456789")

_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

_KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")

_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")

_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

_QTRAIN = ("qmnist-train-images-idx3-ubyte", "qmnist-train-labels-idx2-int")

_QTEST = ("qmnist-test-images-idx3-ubyte", "qmnist-test-labels-idx2-int")

_SOURCES = {
    "mnist": _Source("MNIST", _TRAIN, _TEST, _DIGITS),
    "fashion_mnist": _Source("FashionMNIST", _TRAIN, _TEST, _FASHION),
    "kmnist": _Source("KMNIST", _TRAIN, _TEST, _KUZUSHIJI),
    "qmnist": _Source("QMNIST", _QTRAIN, _QTEST, _DIGITS),
}

_IDX_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}


def load_dataset(cfg: DataConfig) -> Dataset:
    """Load a data set, downloading it when it is not under `cfg.root`.

    Without a network it is replaced by `cfg.fallback`, with a warning on stderr and
    `Dataset.fallback_from` set.

    Raises:
        UserError: A file is damaged, the data cannot be had and `cfg.fallback` is None, or the
            training set is too small for `cfg.val_size`.
    """
    if cfg.name == "digits":
        return _split_off(cfg, "digits", _DIGITS, *_load_digits())
    source = _SOURCES[cfg.name]
    folder = _folder(cfg.name, cfg.root)
    try:
        _fetch(cfg.name, folder, (*source.train, *source.test))
    except DownloadError as error:
        missing = f"{cfg.name} is not in {folder} and cannot be downloaded ({error})"
        if cfg.fallback is None:
            raise UserError(
                f"data.root={cfg.root}: {missing}; put the files there, or train with "
                "data.fallback=digits"
            ) from error
        _warn(f"{missing}. Using scikit-learn's small digits data set instead.")
        small = replace(cfg, name="digits", val_size=min(cfg.val_size, 150))
        return replace(load_dataset(small), fallback_from=cfg.name)
    train, test = (_read_split(folder, *files) for files in (source.train, source.test))
    return _split_off(cfg, cfg.name, source.classes, train, test)


def load_test_split(name: str, root: str) -> Split:
    """Load the test images of a data set, downloading it when they are not under `root`.

    Raises:
        UserError: A file is damaged, or the data cannot be had.
    """
    if name == "digits":
        return _load_digits()[1]
    folder = _folder(name, root)
    try:
        _fetch(name, folder, _SOURCES[name].test)
    except DownloadError as error:
        missing = f"{name} is not in {folder} and cannot be downloaded ({error})"
        raise UserError(f"data.root={root}: {missing}; put the files there") from error
    return _read_split(folder, *_SOURCES[name].test)


def _folder(name: str, root: str) -> Path:
    """Return the folder of a data set's files under `root`."""
    path = Path(root).expanduser()
    if path.exists() and not path.is_dir():
        raise UserError(f"data.root={root}: must be a folder")
    return path / _SOURCES[name].torchvision / "raw"


def _fetch(name: str, folder: Path, files: tuple[str, ...]) -> None:
    """Download a data set unless `files` are in `folder`."""
    if not all((folder / file).is_file() for file in files):
        download(_SOURCES[name].torchvision, folder.parent.parent)


def _split_off(
    cfg: DataConfig, name: str, classes: tuple[str, ...], train: Split, test: Split
) -> Dataset:
    """Hold `cfg.val_size` random images out of the training part, and measure what is left."""
    if cfg.val_size >= len(train):
        raise UserError(
            f"data.val_size={cfg.val_size}: must be below {len(train)}, "
            f"the number of training images of {name}"
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.split_seed))
    val, rest = order[: cfg.val_size], order[cfg.val_size :]
    kept = Split(train.images[rest], train.labels[rest])
    held_out = Split(train.images[val], train.labels[val])
    mean, std = _mean_std(kept.images)
    return Dataset(name, classes, mean, std, kept, held_out, test)


def _mean_std(images: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of uint8 pixels, scaled to [0, 1], from their histogram."""
    count = torch.bincount(images.flatten(), minlength=256).double()
    value = torch.arange(256, dtype=torch.float64) / 255
    mean = (count @ value) / count.sum()
    variance = (count @ (value - mean) ** 2) / count.sum()
    return mean.item(), variance.sqrt().item()


def _read_split(folder: Path, images_file: str, labels_file: str) -> Split:
    images = torch.from_numpy(_read_idx(folder / images_file)).unsqueeze(1)
    labels = torch.from_numpy(_read_idx(folder / labels_file).astype(np.int64))
    labels = labels[:, 0] if labels.ndim == 2 else labels  # QMNIST: the class, then its origins
    if images.shape != (len(labels), 1, 28, 28) or not 0 <= labels.min() <= labels.max() <= 9:
        raise UserError(
            f"{folder}: {images_file} and {labels_file} do not belong together: "
            "delete both and run again"
        )
    return Split(images, labels)


def _read_idx(path: Path) -> np.ndarray[Any, Any]:
    """An array in the IDX format: two zeros, type, number of sizes, sizes, values, big-endian."""
    content = np.fromfile(path, np.uint8)
    magic = content[:4].tolist()
    if len(magic) < 4 or magic[:2] != [0, 0] or magic[2] not in _IDX_TYPES:
        raise UserError(f"{path}: damaged (not an IDX file): delete it and run again")
    dtype, start = _IDX_TYPES[magic[2]], 4 + 4 * magic[3]
    sizes = content[4:start].view(">i4").tolist() if len(content) >= start else []
    expected = start + math.prod(sizes) * dtype.itemsize
    if len(content) != expected:
        raise UserError(
            f"{path}: damaged ({len(content):,} bytes where {expected:,} belong): "
            "delete it and run again"
        )
    return content[start:].view(dtype).reshape(sizes)


def _load_digits() -> tuple[Split, Split]:
    """scikit-learn's 1,797 digits of 8x8 pixels, as (train, test): four in five, one in five.

    Scaled up to 20x20 in the middle of 28x28, which is where MNIST's digits are.
    """
    from sklearn.datasets import load_digits  # a second that only this data set has to pay

    small, classes = load_digits(return_X_y=True)
    pixels = torch.from_numpy(small).float().view(-1, 1, 8, 8) * (255 / 16)
    scaled = F.interpolate(pixels, size=20, mode="bicubic", align_corners=False)
    images = F.pad(scaled.round().clamp(0, 255).to(torch.uint8), (4, 4, 4, 4))
    labels = torch.from_numpy(classes).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def _warn(message: str) -> None:
    line = "!" * 100
    print(f"{line}\nWARNING: {message}\n{line}", file=sys.stderr, flush=True)
