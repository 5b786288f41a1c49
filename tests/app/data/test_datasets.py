import gzip
import hashlib
import socket
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import numpy as np
import pytest
import torch
import torchvision

import app.data.datasets
from app.config.errors import UserError
from app.config.schema import DataConfig, TrainConfig
from app.data.datasets import DownloadError, download, load_dataset
from app.data.transforms import normalize
from app.training.trainer import train
from tests.app.idx import FILES, digit_images, encode_idx, write_dataset

NAMES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "kmnist": "KMNIST", "qmnist": "QMNIST"}
IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


def config(root, **values):
    return DataConfig(root=str(root), **{"name": "mnist", "val_size": 50} | values)


@pytest.fixture
def offline(monkeypatch):
    def refuse(name, root):
        raise DownloadError("mirror.example: no answer within 6 s")

    monkeypatch.setattr(app.data.datasets, "download", refuse)


@pytest.mark.parametrize(("name", "folder"), NAMES.items())
def test_files_on_disk(tmp_path, name, folder):
    write_dataset(tmp_path, folder)
    data = load_dataset(config(tmp_path, name=name))
    assert data.name == name
    assert (len(data.train), len(data.val), len(data.test)) == (250, 50, 100)
    assert data.test.images.shape == (100, 1, 28, 28)
    assert (data.test.images.dtype, data.test.labels.dtype) == (torch.uint8, torch.int64)
    images, labels = digit_images(100, seed=1)
    assert torch.equal(data.test.images[:, 0], torch.from_numpy(images))
    assert torch.equal(data.test.labels, torch.from_numpy(labels).long())
    assert len(data.classes) == 10
    assert data.fallback_from is None


@pytest.mark.parametrize(("name", "folder"), NAMES.items())
def test_names_match_torchvision(name, folder):
    source, theirs = app.data.datasets._SOURCES[name], getattr(torchvision.datasets, folder)
    assert [label.split(" - ")[0] for label in theirs.classes] == list(source.classes)
    if name == "qmnist":
        urls = [url for part in ("train", "test") for url, _ in theirs.resources[part]]
    else:
        urls = [url for url, _ in theirs.resources]
    files = [url.rpartition("/")[2].removesuffix(".gz") for url in urls]
    assert files == [*source.train, *source.test]


def test_validation_split_is_seeded_and_disjoint(tmp_path):
    write_dataset(tmp_path)
    one, again = load_dataset(config(tmp_path)), load_dataset(config(tmp_path))
    other = load_dataset(config(tmp_path, split_seed=1))
    assert torch.equal(one.val.images, again.val.images)
    assert not torch.equal(one.val.images, other.val.images)
    everything = torch.from_numpy(digit_images(300, seed=0)[0]).flatten(1)
    parts = torch.cat([one.train.images, one.val.images]).flatten(1)
    assert torch.equal(torch.unique(parts, dim=0), torch.unique(everything, dim=0))
    assert len(torch.unique(parts, dim=0)) == 300  # disjoint


def test_mean_and_std_of_training_pixels(tmp_path):
    write_dataset(tmp_path)
    data = load_dataset(config(tmp_path))
    pixels = data.train.images.double() / 255
    assert data.mean == pytest.approx(pixels.mean().item(), rel=1e-12)
    assert data.std == pytest.approx(pixels.std(correction=0).item(), rel=1e-12)
    normal = normalize(data.train.images, data.mean, data.std)
    assert normal.dtype == torch.float32
    expected = ((pixels - data.mean) / data.std).float()
    torch.testing.assert_close(normal, expected, rtol=1e-5, atol=1e-6)


def test_digits():
    data = load_dataset(DataConfig(name="digits", val_size=150))
    again = load_dataset(DataConfig(name="digits", val_size=150, split_seed=7))
    assert (len(data.train), len(data.val), len(data.test)) == (1288, 150, 359)
    assert torch.equal(data.test.images, again.test.images)
    assert data.train.images.shape[1:] == (1, 28, 28)
    assert data.train.images.max() == 255
    assert data.train.images[:, :, :4].max() == 0  # the digit is in the middle 20x20
    assert sorted(data.train.labels.unique().tolist()) == list(range(10))


def test_validation_split_too_large_raises(tmp_path):
    write_dataset(tmp_path)
    with pytest.raises(UserError, match=r"data\.val_size=300: must be below 300"):
        load_dataset(config(tmp_path, val_size=300))


@pytest.mark.parametrize("pixel", [0, 128])
def test_equal_pixels_raise(tmp_path, pixel):
    folder = write_dataset(tmp_path / "data")
    images = np.full((300, 28, 28), pixel, np.uint8)
    (folder / "train-images-idx3-ubyte").write_bytes(encode_idx(images))
    reason = f"^data.root={tmp_path}/data: all pixels of the training images of mnist are equal"
    with pytest.raises(UserError, match=reason):
        train(TrainConfig(data=config(tmp_path / "data", val_size=50), outputs=f"{tmp_path}/runs"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # no run folder


def test_missing_test_files_fall_back(tmp_path, offline, capsys):
    for file in write_dataset(tmp_path).glob("t10k-*"):
        file.unlink()
    assert load_dataset(config(tmp_path)).fallback_from == "mnist"


def test_fallback_is_warned_and_recorded(tmp_path, offline, capsys):
    data = load_dataset(config(tmp_path / "nothing", name="kmnist", val_size=5000))
    assert (data.name, data.fallback_from, len(data.val)) == ("digits", "kmnist", 150)
    warning = capsys.readouterr().err
    assert "data set: kmnist is not in" in warning
    assert "mirror.example" in warning
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Error downloading a.gz: Tried https://a.example/, got: <urlopen error [Errno -2] Name "
            "or service not known> Tried http://b.example/, got: HTTP Error 404: Not Found",
            "Name or service not known",
        ),
        ("<urlopen error timed out>", "timed out"),
        ("HTTP Error 403: Forbidden", "HTTP Error 403: Forbidden"),
    ],
)
def test_cause_of_a_failed_download_is_short(tmp_path, monkeypatch, message, cause):
    def fail(*arguments, **options):
        raise RuntimeError(message)

    monkeypatch.setattr("torchvision.datasets.MNIST", fail)
    with pytest.raises(DownloadError) as raised:
        download("MNIST", tmp_path)
    assert str(raised.value) == cause


def test_missing_data_without_fallback_raises(tmp_path, offline):
    with pytest.raises(UserError) as caught:
        load_dataset(config(tmp_path / "nothing", fallback=None))
    assert f"data.root={tmp_path / 'nothing'}: mnist is not in" in str(caught.value)
    assert "data.fallback=digits" in str(caught.value)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("length", [0, 3, 10, 16, 5000])
def test_truncated_file(tmp_path, length):
    folder = write_dataset(tmp_path)
    content = (folder / IMAGES).read_bytes()
    (folder / IMAGES).write_bytes(content[:length])
    with pytest.raises(UserError, match=rf"{IMAGES}: damaged \(.*\): delete it and run again"):
        load_dataset(config(tmp_path))


def test_damaged_file(tmp_path):
    folder = write_dataset(tmp_path)
    (folder / IMAGES).write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match=r"damaged \(not an IDX file\): delete it"):
        load_dataset(config(tmp_path))
    (folder / IMAGES).write_bytes(encode_idx(digit_images(299, 0)[0]))
    with pytest.raises(UserError, match="do not belong together: delete both"):
        load_dataset(config(tmp_path))
    (folder / IMAGES).write_bytes(encode_idx(digit_images(300, 0)[0]))
    (folder / LABELS).write_bytes(encode_idx(digit_images(300, 0)[1] + 10))
    with pytest.raises(UserError, match="do not belong together: delete both"):
        load_dataset(config(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (IMAGES, np.zeros((0, 28, 28), np.uint8)),
        (IMAGES, np.zeros((300, 28, 28), np.int32)),
        (LABELS, np.zeros((300, 1, 1), np.uint8)),
        (LABELS, np.uint8(7)),
    ],
    ids=["no-images", "int32-images", "3d-labels", "scalar"],
)
def test_files_of_another_shape_or_dtype(tmp_path, file, content):
    (write_dataset(tmp_path) / file).write_bytes(encode_idx(content))
    with pytest.raises(UserError, match="do not belong together: delete both"):
        load_dataset(config(tmp_path))


def test_files_without_images(tmp_path):
    write_dataset(tmp_path, sizes=(300, 0))
    with pytest.raises(UserError, match="do not belong together: delete both"):
        load_dataset(config(tmp_path))


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Serve MNIST's archives on localhost; yield their folder."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    resources = []
    for file in sorted((raw := write_dataset(tmp_path / "original")).iterdir()):
        archive = gzip.compress(file.read_bytes())
        (folder / f"{file.name}.gz").write_bytes(archive)
        resources.append((f"{file.name}.gz", hashlib.md5(archive).hexdigest()))
    assert len(list(raw.iterdir())) == len(FILES["MNIST"]) * 2

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [address])
    monkeypatch.setattr("torchvision.datasets.MNIST.resources", resources)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield folder
    server.shutdown()
    server.server_close()


def test_only_damaged_archives_are_downloaded_again(tmp_path, mirror, capfd):
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in list(mirror.iterdir()):
        if archive.name == f"{IMAGES}.gz":
            (raw / archive.name).write_bytes(b"half")
        else:
            archive.rename(raw / archive.name)
    data = load_dataset(config(tmp_path / "data"))
    assert (len(data.train), len(data.test)) == (250, 100)
    assert "100%" in capfd.readouterr().err  # progress bar


def test_invalid_download_raises(tmp_path, mirror):
    for archive in mirror.iterdir():
        archive.write_bytes(b"<html>please log in</html>")
    with pytest.raises(UserError, match="cannot be downloaded"):
        load_dataset(config(tmp_path / "data", fallback=None))


def test_root_that_is_a_file_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.root=.*file: cannot be written: Not a dir"):
        load_dataset(DataConfig(root=str(tmp_path / "file")))


def test_unwritable_root_raises(tmp_path, mirror):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "MNIST").write_text("a file, where a folder should be")
    with pytest.raises(UserError, match=r"data\.root=.*: cannot be written: "):
        load_dataset(config(tmp_path / "data"))


def test_silent_network_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(app.data.datasets, "TIMEOUT", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [address])
        with pytest.raises(DownloadError, match="timed out"):
            download("MNIST", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert socket.getdefaulttimeout() is None


def test_split_moves_to_a_device():
    data = load_dataset(DataConfig(name="digits", val_size=150))
    moved = data.val.to("meta")
    assert moved.images.device.type == moved.labels.device.type == "meta"
    assert len(moved) == len(data.val)
