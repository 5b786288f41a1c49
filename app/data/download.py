"""Fetching a data set through torchvision, where a network that swallows packets is noticed."""

import queue
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.config.errors import UserError

DEADLINE = 6.0  # seconds for the first answer of any mirror, name resolution included
STALLED = 10.0  # seconds without a byte after which a download has failed


class DownloadError(Exception):
    """The files could not be had from the network; the message says why."""


def download(name: str, root: Path) -> None:
    """Bring torchvision's data set `name` to `root`, showing progress on stderr.

    Files that are there and whole are not fetched again.

    Args:
        name: torchvision's class, such as `"MNIST"`.
        root: Folder that holds data sets; made when there is something to put in it.

    Raises:
        DownloadError: There is no network, or the transfer failed.
        UserError: `root` cannot be written.
    """
    from torchvision import datasets  # two seconds that only a download has to pay

    dataset = getattr(datasets, name)
    urls = _missing(dataset, root / name / "raw")
    if urls:
        _probe(urls)
    try:
        (root / name / "raw").mkdir(parents=True, exist_ok=True)
        with _socket_timeout(STALLED):
            for train in (True, False):
                dataset(root, train=train, download=True)
    except (urllib.error.URLError, TimeoutError, ConnectionError, RuntimeError) as error:
        raise DownloadError(" ".join(str(error).split())) from error
    except OSError as error:
        raise UserError(f"data.root={root}: cannot be written: {error.strerror}") from error


def _missing(dataset: Any, raw: Path) -> list[str]:
    """Addresses, from any mirror, of the archives that are not whole in the folder `raw`."""
    from torchvision.datasets.utils import check_integrity

    if isinstance(dataset.resources, dict):  # QMNIST: whole addresses, by part
        resources = [*dataset.resources["train"], *dataset.resources["test"]]
        return [url for url, md5 in resources if not check_integrity(raw / Path(url).name, md5)]
    names = [name for name, md5 in dataset.resources if not check_integrity(raw / name, md5)]
    return [f"{mirror}{name}" for mirror in dataset.mirrors for name in names[:1]]


def _probe(urls: Iterable[str]) -> None:
    """Return when a server of one of `urls` has answered; raise DownloadError when none does.

    Each is asked in a thread of its own that nobody waits for after the deadline: resolving a name
    has no timeout of its own.
    """
    hosts = {urllib.parse.urlsplit(url).netloc: url for url in urls}
    answers: queue.Queue[str | None] = queue.Queue()
    for url in hosts.values():
        threading.Thread(target=lambda url=url: answers.put(_ask(url)), daemon=True).start()
    reasons, end = set(), time.monotonic() + DEADLINE
    try:
        for _ in hosts:
            reason = answers.get(timeout=max(0, end - time.monotonic()))
            if reason is None:
                return
            reasons.add(reason)
    except queue.Empty:
        reasons.add(f"no answer within {DEADLINE:.0f} s")
    raise DownloadError(f"{', '.join(hosts)}: {'; '.join(sorted(reasons))}")


def _ask(url: str) -> str | None:
    """None when the server of `url` offers it, else why not."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "pytorch/vision"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE):
            return None
    except urllib.error.URLError as error:
        return str(error.reason)
    except Exception as error:  # whatever it is, this mirror is of no use
        return str(error) or type(error).__name__


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
