"""The environment variables of torchrun."""

import pytest

from app.config.environment import Torchrun, read_torchrun
from app.config.errors import UserError
from app.training.distributed import connect

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
INTEGER = "Input should be a valid integer, unable to parse string as an integer"
NAMES = (*TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets the variables of torchrun to these values only."""

    def replace(values):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return replace


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"WORLD_SIZE": "abc"}, f"WORLD_SIZE=abc: {INTEGER}"),
        ({"WORLD_SIZE": ""}, f"WORLD_SIZE=: {INTEGER}"),
        ({"WORLD_SIZE": "2.5"}, f"WORLD_SIZE=2.5: {INTEGER}"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: Input should be greater than or equal to 1"),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "WORLD_SIZE=2: needs MASTER_ADDR, MASTER_PORT, too (torchrun sets them)",
        ),
        (
            {"RANK": "3"},
            "RANK=3: needs WORLD_SIZE, MASTER_ADDR, MASTER_PORT, too (torchrun sets them)",
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "1"},
            "RANK=3: should be less than WORLD_SIZE=1 (torchrun sets them)",
        ),
        (TORCHRUN | {"RANK": "2"}, "RANK=2: should be less than WORLD_SIZE=2 (torchrun sets them)"),
        ({"RANK": "-1"}, "RANK=-1: Input should be greater than or equal to 0"),
        (TORCHRUN | {"MASTER_PORT": "x"}, f"MASTER_PORT=x: {INTEGER}"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: Input should be less than 65536"),
        (
            TORCHRUN | {"MASTER_PORT": "0"},
            "MASTER_PORT=0: Input should be greater than or equal to 1",
        ),
        (
            TORCHRUN | {"MASTER_ADDR": "nosuch.invalid"},
            "MASTER_ADDR=nosuch.invalid: cannot be resolved",
        ),
        (TORCHRUN | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b: cannot be resolved"),
        ({"LOCAL_RANK": "x"}, f"LOCAL_RANK=x: {INTEGER}"),
        (
            {"TORCHELASTIC_RESTART_COUNT": "x"},
            f"TORCHELASTIC_RESTART_COUNT=x: {INTEGER}",
        ),
    ],
)
def test_wrong_variables_are_usage_errors(environment, values, line):
    environment(values)
    with pytest.raises(UserError) as caught, connect():
        pass
    assert str(caught.value) == line


def test_variables_of_torchrun(environment):
    environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3", "LOCAL_RANK": "1"})
    found = read_torchrun()
    assert (found.size, found.rank, found.local_rank, found.restarts) == (2, 1, 1, 3)
    environment({"RANK": "0"})
    assert read_torchrun() == Torchrun()
