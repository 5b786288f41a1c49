import os
import signal
from pathlib import Path

import pytest

# Spinning OpenMP threads make the tests four times slower on a shared machine. OpenMP reads this
# when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Commands run in other folders.
searched = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(searched)
# Commands buffer their output, as they do for users.
os.environ.pop("PYTHONUNBUFFERED", None)
# A background job inherits SIGINT ignored, under nohup SIGHUP, and so do the commands that tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "number of runs to kill at random times and resume (default: 1)"
    parser.addoption("--kills", type=int, default=1, help=help)
    parser.addoption("--exhaustive", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect CUDA tests without a GPU, and exhaustive ones: skips would be pages of lines."""
    left_out = set() if config.getoption("--exhaustive") else {"exhaustive"}
    if any(item.get_closest_marker("cuda") for item in items):
        import torch  # slow: only for runs with CUDA tests

        left_out |= set() if torch.cuda.is_available() else {"cuda"}
    kept, deselected = [], []
    for item in items:
        (deselected if any(map(item.get_closest_marker, left_out)) else kept).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = kept


@pytest.fixture(scope="module")  # one Playwright per process at a time
def browser():
    """Yield a headless Chromium."""
    from tests.app.web.browser import chromium, missing

    if reason := missing():
        pytest.skip(reason)
    with chromium() as running:
        yield running


@pytest.fixture
def one_thread():
    """Run torch with one thread: parallel tests share the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
