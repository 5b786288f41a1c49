from types import SimpleNamespace

import pytest
import torch

import app.config.device
from app.config.device import choose_threads, describe, pick_device
from app.config.errors import UserError


def test_auto_selects_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("cuda:1") == torch.device("cuda:1")


def test_missing_device_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"=cuda: not on this machine, choose from auto, cpu$"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"choose from auto, cpu, cuda:0, cuda:1$"):
        pick_device("cuda:2")
    for index in ("128", "256", "9" * 20, "00"):
        with pytest.raises(UserError, match=rf"cuda:{index}: not on this machine, choose from"):
            pick_device(f"cuda:{index}")


def test_describe(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert describe(torch.device("cpu")) == "cpu, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert describe(torch.device("cpu")) == "cpu, 8 threads"


@pytest.fixture
def machine(monkeypatch):
    """Replace torch's 4 threads and the probe, which finds 1; return the state."""
    state = SimpleNamespace(threads=4, probes=0)

    def probe(most):
        state.probes += 1
        return 1

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(app.config.device, "fastest_threads", probe)
    monkeypatch.setattr(torch, "get_num_threads", lambda: state.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(state, "threads", count))
    return state


def test_threads_follow_the_load(machine):
    choose_threads(torch.device("cpu"))
    assert (machine.threads, machine.probes) == (1, 1)


def test_resume_restores_threads(machine):
    choose_threads(torch.device("cpu"), before=2)
    assert (machine.threads, machine.probes) == (2, 0)


@pytest.mark.parametrize(("device", "environment"), [("cpu", "4"), ("cuda", None)])
def test_omp_num_threads_and_gpus_fix_the_threads(machine, monkeypatch, device, environment):
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    choose_threads(torch.device(device))
    assert (machine.threads, machine.probes) == (4, 0)
