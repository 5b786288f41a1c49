"""Small data sets in torchvision's file formats, and random images."""

from pathlib import Path

import numpy as np
import torch

FILES = {
    "MNIST": ("train-{}-idx{}-ubyte", "t10k-{}-idx{}-ubyte"),
    "FashionMNIST": ("train-{}-idx{}-ubyte", "t10k-{}-idx{}-ubyte"),
    "KMNIST": ("train-{}-idx{}-ubyte", "t10k-{}-idx{}-ubyte"),
    "QMNIST": ("qmnist-train-{}-idx{}-{}", "qmnist-test-{}-idx{}-{}"),
}


def random_images(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)


def encode_idx(array):
    kind = {"uint8": 8, "int32": 12}[array.dtype.name]
    header = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def digit_images(count, seed):
    """Return images and labels of ten easy classes: the label is the row of a bright bar."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[4 + 2 * label : 6 + 2 * label, 6:22] = 255
    return images, labels


def write_dataset(root, name="MNIST", sizes=(300, 100)):
    """Write the data set's four files and return their folder."""
    folder = Path(root) / name / "raw"
    folder.mkdir(parents=True)
    for seed, (template, count) in enumerate(zip(FILES[name], sizes, strict=True)):
        images, labels = digit_images(count, seed)
        if name == "QMNIST":
            labels = np.concatenate([labels[:, None], np.zeros((count, 7))], 1).astype(np.int32)
            names = template.format("images", 3, "ubyte"), template.format("labels", 2, "int")
        else:
            names = template.format("images", 3), template.format("labels", 1)
        for file, array in zip(names, (images, labels), strict=True):
            (folder / file).write_bytes(encode_idx(array))
    return folder
