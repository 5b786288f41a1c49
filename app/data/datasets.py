"""Data sets: download or read them, split off the validation images, fall back to digits."""

import importlib.util
import math
import re
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from app.config.errors import UserError, one_line, writing
from app.config.schema import DataConfig, from_mapping

TIMEOUT = 6.0  # seconds without a byte until a mirror is given up


@dataclass
class Split:
    """Images uint8 [N, 1, 28, 28] with background 0, and labels int64 [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> "Split":
        return Split(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> "Split":
        """Return the split on `device`."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass
class Dataset:
    """A data set in memory."""

    name: str  # as in `DataConfig.name`
    classes: tuple[str, ...]  # names of the labels 0, 1, ...
    mean: float  # mean of the training pixels in [0, 1]
    std: float  # standard deviation of the training pixels
    train: Split  # training images without the validation images
    val: Split  # validation images, held out of the training images to choose a checkpoint
    test: Split  # test images, used once, at the end
    fallback_from: str | None = None  # the requested data set, if this one replaces it

    def to(self, device: torch.device) -> "Dataset":
        """Return the data set with its images on `device`."""
        parts = {part: getattr(self, part).to(device) for part in ("train", "val", "test")}
        return replace(self, **parts)


@dataclass(frozen=True)
class _Source:
    """A torchvision data set: class in torchvision, (images, labels) files, class names."""

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


class DownloadError(Exception):
    """A failed download, with the reason."""


def load_dataset(cfg: DataConfig) -> Dataset:
    """Load a data set and split off its validation images.

    If the download fails, load `cfg.fallback` instead with a warning, or raise a UserError.
    """
    try:
        train, test = load_split(cfg, train=True), load_split(cfg, train=False)
    except DownloadError as error:
        if cfg.fallback is None:
            remedy = "put the files there, or train with data.fallback=digits"
            raise UserError(f"data.root={cfg.root}: {error}; {remedy}") from error
        warning = f"WARNING: using scikit-learn's small digits data set: {error}"
        print("!" * 100, warning, "!" * 100, sep="\n", file=sys.stderr, flush=True)
        small = replace(cfg, name="digits", val_size=min(cfg.val_size, 150))
        return replace(load_dataset(small), fallback_from=cfg.name)
    if cfg.val_size >= len(train):
        limit = f"must be below {len(train)}, the number of training images of {cfg.name}"
        raise UserError(f"data.val_size={cfg.val_size}: {limit}")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(cfg.split_seed))
    val, rest = train[order[: cfg.val_size]], train[order[cfg.val_size :]]
    classes = _SOURCES[cfg.name].classes if cfg.name in _SOURCES else _DIGITS
    if rest.images.min() == rest.images.max():  # their standard deviation is 0
        reason = f"all pixels of the training images of {cfg.name} are equal"
        raise UserError(f"data.root={cfg.root}: {reason}, replace its files")
    return Dataset(cfg.name, classes, *_mean_std(rest.images), rest, val, test)


def load_split(cfg: DataConfig, train: bool) -> Split:
    """Load the training or test images of a data set; download it if it is missing.

    Raise a DownloadError if that fails, a UserError if a file is damaged or `cfg.root` unusable.
    """
    if cfg.name == "digits":
        return _load_digits(train)
    source, root = _SOURCES[cfg.name], Path(cfg.root)
    folder = root / source.torchvision / "raw"
    files = source.train if train else source.test
    if not all((folder / file).is_file() for file in files):
        try:
            download(source.torchvision, root)
        except DownloadError as error:
            missing = f"{cfg.name} is not in {folder} and cannot be downloaded ({error})"
            raise DownloadError(missing) from error
    return _read_split(folder, *files)


def load_test_split(name: str, root: str) -> Split:
    """Load only the test images of a data set; download it if it is not under `root`."""
    try:
        return load_split(from_mapping(DataConfig, {"root": root, "name": name}), train=False)
    except DownloadError as error:
        raise UserError(f"data.root={root}: {error}; put the files there") from error


def download(name: str, root: Path) -> None:
    """Download torchvision's data set `name` to `root`, or raise a DownloadError."""
    folder = root / name / "raw"
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(f"data.root={root}", UserError):
        folder.mkdir(parents=True, exist_ok=True)
    from torchvision import datasets  # late: it is slow

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        for train in (True, False):
            getattr(datasets, name)(root, train=train, download=True)
    except Exception as error:  # torchvision raises many types
        raise DownloadError(_cause(one_line(error))) from error
    finally:
        socket.setdefaulttimeout(before)
        for path in missing:  # rmdir keeps folders that are not empty
            with suppress(OSError):
                path.rmdir()


def _cause(message: str) -> str:
    """Return the first mirror's error without the text that torchvision and urllib add."""
    cause = message.partition(", got: ")[2].partition(" Tried ")[0] or message
    return re.sub(r"^<urlopen error (?:\[.*?\] )?(.*)>$", r"\1", cause)


def _mean_std(images: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of uint8 pixels scaled to [0, 1], from the histogram."""
    count = torch.bincount(images.flatten(), minlength=256).double()
    value = torch.arange(256, dtype=torch.float64) / 255
    mean = (count @ value) / count.sum()
    variance = (count @ (value - mean) ** 2) / count.sum()
    return mean.item(), variance.sqrt().item()


def _read_split(folder: Path, images_file: str, labels_file: str) -> Split:
    images = _read_idx(folder / images_file)
    labels = _read_idx(folder / labels_file).astype(np.int64)
    labels = labels[:, 0] if labels.ndim == 2 else labels  # QMNIST: column 0 is the class
    valid_images = images.dtype == np.uint8 and images.shape == (labels.size, 28, 28)
    valid_labels = labels.ndim == 1 and labels.size and np.isin(labels, range(10)).all()
    if not (valid_images and valid_labels):
        both = f"{images_file} and {labels_file}"
        raise UserError(f"{folder}: {both} do not belong together: delete both and run again")
    return Split(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels))


def _read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Read an IDX file: two zero bytes, dtype code, rank, shape, values; big-endian.

    Importing torchvision's reader would double the start-up time of every command.
    """
    content = np.fromfile(path, np.uint8)
    magic = content[:4].tolist()
    if len(magic) < 4 or magic[:2] != [0, 0] or magic[2] not in _IDX_TYPES:
        raise UserError(f"{path}: damaged (not an IDX file): delete it and run again")
    dtype, start = _IDX_TYPES[magic[2]], 4 + 4 * magic[3]
    sizes = content[4:start].view(">i4").tolist() if len(content) >= start else []
    expected = start + math.prod(sizes) * dtype.itemsize
    if len(content) != expected:
        found = f"{len(content):,} bytes where {expected:,} belong"
        raise UserError(f"{path}: damaged ({found}): delete it and run again")
    return content[start:].view(dtype).reshape(sizes)


def _load_digits(train: bool) -> Split:
    """Load scikit-learn's 1,797 digits of 8x8 pixels, scaled to 20x20 in 28x28: 80 % or 20 %."""
    package = importlib.util.find_spec("sklearn")  # importing it takes two seconds
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    small, classes = table[:, :-1], table[:, -1]
    pixels = torch.from_numpy(small).float().view(-1, 1, 8, 8) * (255 / 16)
    scaled = F.interpolate(pixels, size=20, mode="bicubic", align_corners=False)
    images = F.pad(scaled.round().clamp(0, 255).to(torch.uint8), (4, 4, 4, 4))
    labels = torch.from_numpy(classes).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return Split(images, labels)[order[len(order) // 5 :] if train else order[: len(order) // 5]]
