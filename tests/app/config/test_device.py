import pytest
import torch

import app.config.device
from app.config.device import CpuThreads, describe, pick_device
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


def test_describe(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert describe(torch.device("cpu")) == "cpu, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert describe(torch.device("cpu")) == "cpu, 8 threads"


class Clock:
    """A clock that tests advance."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    """Replace torch's 4 threads and the thread probe; return the clock with their state."""
    clock = Clock()
    clock.threads, clock.fastest, clock.probes = 4, 4, 0

    def probe(most):
        clock.probes += 1
        return clock.fastest

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(app.config.device, "time", clock)
    monkeypatch.setattr(app.config.device, "fastest_threads", probe)
    monkeypatch.setattr(torch, "get_num_threads", lambda: clock.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(clock, "threads", count))
    return clock


def test_threads_follow_the_load(machine):
    threads = CpuThreads(torch.device("cpu"))

    def window(seconds):
        machine.now += seconds
        threads.adapt()
        return machine.threads

    assert [window(1.0), window(1.4)] == [4, 4]
    machine.fastest = 1
    assert [window(1.4), machine.probes] == [4, 1]
    assert [window(3.0), machine.probes] == [1, 2]
    machine.fastest = 4
    assert [window(1.2), window(1.2), machine.probes] == [1, 1, 2]
    assert [window(3.0), machine.probes] == [4, 3]  # five seconds after the last probe


def test_threads_chosen_under_load_are_probed_again(machine):
    machine.fastest = 1
    threads = CpuThreads(torch.device("cpu"))
    machine.now += 2.0
    threads.adapt()
    machine.fastest, machine.now = 4, machine.now + 4.0
    threads.adapt()
    assert machine.threads == 4
    machine.fastest, machine.now = 1, machine.now + 6.0
    threads.adapt()
    assert machine.threads == 1


def test_resume_restores_threads(machine):
    machine.fastest = 4
    CpuThreads(torch.device("cpu"), before=2)
    assert (machine.threads, machine.probes) == (2, 0)


@pytest.mark.parametrize(("device", "environment"), [("cpu", "4"), ("cuda", None)])
def test_omp_num_threads_and_gpus_fix_the_threads(machine, monkeypatch, device, environment):
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    machine.fastest = 1
    threads = CpuThreads(torch.device(device))
    for seconds in (1.0, 100.0, 100.0):
        machine.now += seconds
        threads.adapt()
    assert (machine.threads, machine.probes) == (4, 0)
