import resource
import signal
from contextlib import contextmanager

import pytest


@pytest.fixture
def limited_files():
    """Return a context manager that limits file sizes to simulate a full disk."""

    @contextmanager
    def limit():
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limit
