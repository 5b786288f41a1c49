"""Hypothesis settings and strategies for random geometries."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def drawn(examples: int) -> settings:
    """Return settings for a number of geometries, the same in every run."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))
