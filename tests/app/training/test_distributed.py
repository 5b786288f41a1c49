"""Two CPU processes under torchrun: equal to one process, restart, shared data set."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from app.config.errors import RunError, UserError
from app.runs.checkpoint import load_checkpoint
from app.runs.folder import find_runs
from app.training import distributed
from app.training.distributed import World, call_in_thread
from app.training.state import start
from app.training.trainer import train
from tests.app.idx import write_dataset
from tests.app.training.test_resume import cfg, curves  # noqa: F401
from tests.networks import ROOT

DYING = """
import itertools, os, signal
from app.training import trainer
from app.training.step import TrainStep
from app.train import main

take, calls = TrainStep.take, itertools.count()

def dying(train_step):
    world = train_step.world
    if next(calls) == 10 and world.rank == 1 and world.restarts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    take(train_step)

trainer.ALL_REDUCE_EVERY = 1
TrainStep.take = dying
main()
"""


def torchrun(script, overrides, *options, processes=2, timeout=200):
    """Run a script by torchrun; return exit code, stdout and stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={processes}", *options, str(script), *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout, done.stderr


def test_two_processes_with_a_restart_match_one(cfg, tmp_path):  # noqa: F811
    cfg.trainer.precision, cfg.trainer.epochs, cfg.optim.ema = "fp64", 2, 0.0
    train(cfg)
    (alone,) = find_runs(Path(cfg.outputs))
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    overrides = [
        f"data.root={cfg.data.root}", "data.val_size=60", "model.act=ncrelu", "device=cpu",
        "augment.rotation=10", "augment.shift=2", "augment.scale=0.1", "augment.shear=5",
        "optim.lr=0.1", "trainer.epochs=2", "trainer.batch_size=32", "trainer.log_every=3",
        "trainer.checkpoint_steps=2", "trainer.precision=fp64", f"outputs={tmp_path / 'two'}",
    ]  # fmt: skip
    code, output, errors = torchrun(script, overrides, "--max-restarts=1")
    assert code == 0, errors
    (together,) = find_runs(tmp_path / "two")  # only rank 0 writes
    assert "going on after step" in output
    assert output.count("test accuracy") == 1
    ours, theirs = curves(alone), curves(together)
    assert ours.keys() == theirs.keys()
    for name, points in ours.items():
        torch.testing.assert_close(points, theirs[name], rtol=1e-5, atol=1e-5)
    weights, others = (load_checkpoint(path / "last.pt").model for path in (alone, together))
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-4)
    assert json.loads((together / "summary.json").read_text())["processes"] == 2
    assert load_checkpoint(together / "last.pt").training["state"]["model"]


@pytest.mark.parametrize(("rank", "number"), [("0", signal.SIGINT), ("1", signal.SIGTERM)])
def test_signal_ends_the_wait_for_other_processes(tmp_path, rank, number):
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.train", "data=digits", f"outputs={tmp_path}"],
        env=os.environ | environment | {"RANK": rank},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stderr.readline()
        assert line == f"rank {rank}: waiting for 2 processes at localhost:{port}\n"
        process.send_signal(number)
        assert process.wait(5) == 130
        assert process.stderr.read() == "interrupted\n"
    finally:
        process.kill()
        process.communicate()


def test_error_while_waiting_is_raised(capsys, monkeypatch):
    def fail():
        time.sleep(0.1)
        raise RuntimeError("timed out")

    monkeypatch.setattr(distributed, "ANNOUNCE_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="timed out"):
        call_in_thread(fail, "waiting")
    assert capsys.readouterr().err == "waiting\n"


DISAGREEING = """
import os, sys
from app.data import datasets
from app.training import trainer
from app.training import distributed
from app.training.distributed import World, call_in_thread
from app.train import main

root = sys.argv.pop(1)
os.environ["DATA_ROOT"] = root if os.environ["RANK"] == "1" else "nothing"
close, save = World.close, trainer.save

def offline(name, root):
    raise datasets.DownloadError("no network")

def threads():
    return len(os.listdir("/proc/self/task"))

def counting_close(world):
    before = threads()
    close(world)
    print(f"joined: {before > threads()}", flush=True)
    print(f"compiler: {'torch._dynamo' in sys.modules}", flush=True)

def printing_save(run, name, **metrics):
    if name == "last.pt":
        print("saved", run.step, flush=True)
    save(run, name, **metrics)

datasets.download, World.close, trainer.save = offline, counting_close, printing_save
main()
"""


def test_fallback_on_rank_0_applies_to_all_ranks(tmp_path):
    """Train with MNIST on rank 1 only, to the end, where gloo's threads are joined."""
    write_dataset(tmp_path / "data")
    script = tmp_path / "disagreeing.py"
    script.write_text(DISAGREEING)
    overrides = [str(tmp_path / "data"), "trainer.epochs=1", "trainer.batch_size=64"]
    overrides += ["trainer.checkpoint_steps=5", f"outputs={tmp_path / 'out'}"]
    code, output, errors = torchrun(script, overrides)
    assert code == 0, errors
    (folder,) = find_runs(tmp_path / "out")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["dataset"], summary["fallback_from"]) == ("digits", "mnist")
    assert summary["processes"] == 2
    assert errors.count("data set: mnist is not in") == 1
    saved = [int(line.split()[1]) for line in output.splitlines() if line.startswith("saved")]
    assert saved == [5, 10, 15, 20]
    assert output.count("joined: True") == 2
    assert output.count("compiler: False") == 2  # importing it takes five seconds


@pytest.mark.parametrize(
    ("override", "processes", "restarts"),
    [
        pytest.param("seed=x", 1, 1, marks=pytest.mark.exhaustive),
        pytest.param("data.val_size=5000", 2, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_usage_error_is_printed_once(tmp_path, override, processes, restarts):
    """Not once a process and once a restart; rank 0 sends errors in the data to the others."""
    overrides = ["data=digits", override, f"outputs={tmp_path}"]
    script = ROOT / "app" / "train.py"
    options = [f"--max-restarts={restarts}"]
    code, _, errors = torchrun(script, overrides, *options, processes=processes)
    assert code != 0
    assert errors.count(f"error: {override}: ") == 1


def test_unexpected_error_on_rank_0_is_raised_on_all_ranks(monkeypatch):
    sent = []

    def broadcast(objects, device):
        if sent:
            objects[:] = pickle.loads(sent.pop())
        else:
            sent.append(pickle.dumps(objects))

    def fail():
        error = ValueError("no such thing")
        error.unpicklable = fail
        raise error

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    with pytest.raises(ValueError, match=r"^no such thing$"):
        World(0, 2).from_rank_0(fail)
    with pytest.raises(RunError, match=r"^rank 0 failed: ValueError: no such thing$"):
        World(1, 2).from_rank_0(fail)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"trainer\.batch_size=32: must be a multiple of 3"),
        (
            {"batch_size": 33, "val_size": 298},
            r"data\.val_size=298: leaves 2 training images, at least 3 are needed, one a process",
        ),
    ],
)
def test_indivisible_batch_or_data_raises(cfg, change, message):  # noqa: F811
    cfg.trainer.batch_size = change.get("batch_size", 32)
    cfg.data.val_size = change.get("val_size", 60)

    class Three(World):
        def from_rank_0(self, function):
            return function()

    with ExitStack() as stack, pytest.raises(UserError, match=message):
        start(cfg, Three(0, 3), stack, {}, None)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", ["auto", "false"])
def test_run_on_two_gpus_ends(tmp_path, compiled):
    """A communicator waits for CUDA graphs that captured its operations."""
    write_dataset(tmp_path / "data")
    overrides = [f"data.root={tmp_path / 'data'}", "data.val_size=60", "trainer.epochs=2"]
    overrides += ["trainer.batch_size=32", f"trainer.compile={compiled}", f"outputs={tmp_path}"]
    code, output, errors = torchrun(ROOT / "app" / "train.py", overrides, timeout=90)
    assert code == 0, errors
    assert output.splitlines()[-1].startswith("test accuracy ")
    (folder,) = find_runs(tmp_path)
    assert json.loads((folder / "summary.json").read_text())["processes"] == 2
