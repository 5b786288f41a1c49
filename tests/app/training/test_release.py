"""Resources of a run are released in the reverse order of their making, on every way out."""

import math
import signal
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch

import app.training.state
from app.config.errors import RunError
from app.runs.folder import locked
from app.runs.tracker import Tracker
from app.training import trainer as training
from app.training.distributed import LostPeerError, World, wait
from app.training.step import TrainStep
from app.training.trainer import train
from tests.app.training.moments import before_step
from tests.app.training.test_trainer import cfg  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")


def run_out_of_memory(_):
    raise torch.OutOfMemoryError


def lose_a_peer(_):
    raise LostPeerError


WAYS_OUT = {
    "done": (None, lambda _: None),
    "interrupt": (KeyboardInterrupt, lambda _: signal.raise_signal(signal.SIGINT)),
    "run error": (RunError, lambda step: step.statistics.fill_(math.nan)),
    "out of memory": (RunError, run_out_of_memory),
    "lost peer": (RunError, lose_a_peer),
    "a mistake": (ZeroDivisionError, lambda _: 1 / 0),
}


@pytest.fixture
def released(monkeypatch):
    """Return the list of what was released; steps are replayed by an imitated CUDA graph."""
    order = []

    class Graph:
        def __init__(self, step):
            self.replay = step._step  # refers to the step, as a graph refers to its tensors

        def reset(self):
            order.append("graph")

    def begin(step, *arguments):
        original_begin(step, *arguments)
        step._graph = step._graph or Graph(step)

    def record(owner, name, label):
        original = getattr(owner, name)

        def recording(*arguments, **options):
            order.append(label)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, recording)

    @contextmanager
    def recording_lock(folder):
        try:
            with locked(folder):
                yield
        finally:
            order.append("lock")

    original_begin = TrainStep.begin
    monkeypatch.setattr(TrainStep, "begin", begin)
    record(World, "abort", "abort")
    record(World, "close", "destroy")
    record(Tracker, "close", "curves")
    monkeypatch.setattr(app.training.state, "locked", recording_lock)
    return order


@pytest.mark.parametrize(("error", "action"), WAYS_OUT.values(), ids=WAYS_OUT)
def test_everything_is_released_in_reverse_order(cfg, monkeypatch, released, error, action):  # noqa: F811
    before_step(monkeypatch, 9, action)
    if error is None:
        train(cfg)
    else:
        with pytest.raises(error):  # holds the traceback, and so the run
            train(cfg)
    expected = ["curves", "lock", "abort", "graph", "destroy"]
    assert list(dict.fromkeys(released)) == [it for it in expected if error or it != "abort"]


def test_failed_abort_does_not_hide_the_error(cfg, monkeypatch):  # noqa: F811
    def close(world):
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(World, "close", close)
    before_step(monkeypatch, 3, lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(cfg)


def test_graph_is_released_if_its_capture_fails(cfg, monkeypatch, released):  # noqa: F811
    def fail(step, *arguments):
        begin(step, *arguments)
        raise torch.OutOfMemoryError

    begin = TrainStep.begin
    monkeypatch.setattr(TrainStep, "begin", fail)
    with pytest.raises(RunError, match="out of memory"):
        train(cfg)
    assert list(dict.fromkeys(released)) == ["curves", "lock", "abort", "graph", "destroy"]


def test_wait_ends_after_a_signal_without_the_peer(monkeypatch):
    monkeypatch.setattr("app.training.distributed.PATIENCE", 0.05)
    answers = iter([False, False, True])
    wait(lambda: next(answers), lambda: False)
    started = time.monotonic()
    with pytest.raises(LostPeerError):
        wait(
            lambda: time.monotonic() - started > 5,  # as if the peer had come back
            lambda: time.monotonic() - started > 0.05,
        )
    assert time.monotonic() - started > 0.1


@pytest.mark.parametrize(("compiled", "count"), [("auto", 0), (False, 12)])
def test_peers_are_asked_before_the_queue_of_the_gpu_is_full(cfg, monkeypatch, compiled, count):  # noqa: F811
    class Pair(World):
        def from_rank_0(self, function):
            return function()

        def replicate(self, tensors):
            pass

        def sum(self, values):
            return values

        def any(self, *flags):
            asked.append(flags)
            return list(flags)

    asked = []
    monkeypatch.setattr(training, "connect", lambda: nullcontext(Pair(0, 2)))
    cfg.trainer.compile = compiled
    train(cfg)
    assert len(asked) == count + cfg.trainer.epochs


def test_step_that_never_ends_is_a_lost_peer(cfg, monkeypatch, capsys):  # noqa: F811
    """Rank 0 waits for the device; torchrun, which saw a peer die, sends SIGTERM."""

    def to_cpu(world, values, interrupted):
        if not sent:
            sent.append(signal.raise_signal(signal.SIGTERM))
            wait(lambda: False, interrupted)
        return values

    sent = []
    monkeypatch.setattr("app.training.distributed.PATIENCE", 0.05)
    monkeypatch.setattr(World, "to_cpu", to_cpu)
    with pytest.raises(RunError, match="lost the connection to another process at step 7"):
        train(cfg)
