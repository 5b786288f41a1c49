"""Expected failures of a run become a RunError: out of memory, lost peer."""

import socket
from types import SimpleNamespace

import pytest

from app.config.errors import RunError
from app.training import failures
from app.training.distributed import World
from app.training.trainer import train
from tests.app.training.test_trainer import cfg  # noqa: F401


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_out_of_memory_is_recognised_by_message(text):
    with (
        pytest.raises(RunError, match=r"^out of memory"),
        failures.expected_failures(),
    ):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match=r"^depth"), failures.expected_failures():
        raise RuntimeError(f"depthwise_conv2d: {text[-9:]}")


def test_failed_rendezvous_is_a_run_error(cfg, monkeypatch):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the port
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        for name, value in (address | {"WORLD_SIZE": "2", "RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            RunError, match=r"^no connection to the others before the first step: "
        ) as e:
            train(cfg)
    assert "address already in use" in str(e.value)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def test_message_about_nccl_in_one_process_is_no_lost_peer():
    run = SimpleNamespace(world=World(), step=3)
    for arguments in ((), (run,)):
        with (
            pytest.raises(RuntimeError, match="NCCL 2 is too old"),
            failures.expected_failures(*arguments),
        ):
            raise RuntimeError("NCCL 2 is too old")


def test_failed_collective_operation_names_its_reason(monkeypatch):
    monkeypatch.setattr(failures, "last_checkpoint", lambda run: "no checkpoint yet")
    run = SimpleNamespace(world=World(0, 2), step=3)
    reason = "[gloo/pair.cc:534] Connection closed by peer"
    line = f"lost the connection to another process at step 3: {reason} (no checkpoint yet)"
    with pytest.raises(RunError) as error, failures.expected_failures(run):
        raise RuntimeError(f"{reason}\nframe #0")
    assert str(error.value) == line
