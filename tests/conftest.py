"""What holds for every test."""

import os

import pytest

# Threads that wait by spinning hold up those that work where the machine is shared: the tests took
# four times as long. Read by OpenMP when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "how many runs to kill at random moments and to resume (default: 1)"
    parser.addoption("--kills", type=int, default=1, help=help)
    parser.addoption("--exhaustive", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need a GPU where there is none: one number instead of thousands."""
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not on_gpu:
        return
    import torch  # late: most of the application's tests start faster without it

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("exhaustive") and not item.config.getoption("--exhaustive"):
        pytest.skip("takes long: --exhaustive runs it")


@pytest.fixture(scope="module")  # Playwright runs once at a time in a process
def browser():
    """A headless Chromium."""
    from tests.app.web.browser import chromium, missing

    if reason := missing():
        pytest.skip(reason)
    with chromium() as running:
        yield running
