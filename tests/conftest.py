"""Markers that every test understands."""

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch  # late: most of the application's tests start faster without it

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
