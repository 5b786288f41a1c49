"""Collective operations of training processes under torchrun; no-ops for one process."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from app.config.environment import Torchrun, read_torchrun
from app.config.errors import RunError, UserError, one_line, to_run_error

T = TypeVar("T")
PATIENCE = 5.0  # seconds from a signal until unfinished steps mean a lost peer
ANNOUNCE_SECONDS = 5.0  # from the start of a wait for other processes until it is announced
POLL_SECONDS = 1e-4


class LostPeerError(RuntimeError):
    """A collective operation did not finish: another process is missing."""


@dataclass
class World:
    """This process and its communication with the other ranks."""

    rank: int = 0  # index of this process; rank 0 writes and prints
    size: int = 1  # number of processes
    restarts: int = 0  # number of restarts by torchrun
    launch: str = ""  # identifies this launch of torchrun; "" without torchrun
    aborting: Thread | None = field(default=None, init=False)

    def replicate(self, tensors: list[Tensor]) -> None:
        """Copy tensors of one dtype and device from rank 0 to the other ranks, in place."""
        if self.size > 1:
            _apply_flat(tensors, lambda flat: torch.distributed.broadcast(flat, 0))

    def average(self, tensors: list[Tensor]) -> None:
        """Average tensors of one dtype and device over the ranks, in place.

        DistributedDataParallel overlaps it with backward, but imports torch's compiler (5 s).
        """
        if self.size > 1:
            _apply_flat(tensors, lambda flat: self.sum(flat).div_(self.size))

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any process has set it."""
        if self.size == 1:
            return list(flags)
        return [count > 0 for count in self.sum(torch.tensor(flags).int()).tolist()]

    def from_rank_0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; return its result on every rank.

        Raise its error on every rank. The other ranks raise a UserError or RunError as it is, and
        any other error as a RunError.
        """
        if self.size == 1:
            return function()
        outcome: list[T | Exception | None] = [None]
        failure = None
        if self.rank == 0:
            try:
                outcome = [function()]
            except Exception as error:
                failure = sent = to_run_error(error)
                if not isinstance(sent, UserError | RunError):  # may not be picklable
                    sent = RunError(f"rank 0 failed: {type(error).__name__}: {one_line(error)}")
                outcome = [sent]
        torch.distributed.broadcast_object_list(outcome, device=torch.device("cpu"))
        if failure:
            raise failure
        if isinstance(outcome[0], UserError | RunError):
            raise outcome[0]
        return outcome[0]  # type: ignore[return-value]

    def to_cpu(self, values: Tensor, interrupted: Callable[[], bool]) -> Tensor:
        """Copy a tensor to the CPU.

        The all-reduce of a GPU waits for a lost peer for ever, and torchrun sends a signal to the
        other processes. So wait in Python, which handles signals, and not in the CUDA driver.
        """
        if self.size > 1 and values.is_cuda:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(values.device))
            wait(done.query, interrupted)
        return values.cpu()

    def abort(self) -> None:
        """Abort the collective operations in a thread: they may wait for a lost peer for ever.

        Do not wait for the thread: NCCL waits until the CUDA graphs that captured a collective
        operation are reset, and a reset waits for running operations, which the abort ends.
        """
        if self.size == 1 or self.aborting or not torch.distributed.is_initialized():
            return
        self.aborting = Thread(target=_abort_world, daemon=True)
        self.aborting.start()

    def close(self) -> None:
        """Destroy the process group, after CUDA graphs with its operations; wait for `abort`."""
        if self.aborting:
            self.aborting.join()
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@torch.no_grad()
def _apply_flat(tensors: list[Tensor], operation: Callable[[Tensor], Any]) -> None:
    """Apply an in-place operation to the elements of all tensors at once."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    operation(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(tensors, views)


def _abort_world() -> None:
    if group := torch.distributed.group.WORLD:
        with suppress(RuntimeError):  # the error of the run tells more
            group.abort()


def wait(done: Callable[[], bool], interrupted: Callable[[], bool]) -> None:
    """Wait until `done`; raise a LostPeerError `PATIENCE` seconds after a signal."""
    deadline = None
    while not done():
        time.sleep(POLL_SECONDS)
        if deadline is None and interrupted():
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            raise LostPeerError


@contextmanager
def connect() -> Iterator[World]:
    """Join the process group of torchrun; close it after the block, abort it if that raises."""
    world = _join()
    try:
        yield world
    except BaseException:
        world.abort()
        with suppress(RuntimeError):  # the error of the block tells more
            world.close()
        raise
    world.close()


def _join() -> World:
    """Join the process group of torchrun: NCCL for CUDA tensors, gloo for CPU tensors."""
    started = read_torchrun()
    launch = f"{started.run_id} {socket.gethostname()} {os.getppid()}" if started.run_id else ""
    if started.size > 1:
        host = os.environ["MASTER_ADDR"]
        try:  # torch would try for half an hour
            socket.getaddrinfo(host, started.port)
        except (OSError, UnicodeError) as error:
            raise UserError(f"MASTER_ADDR={host}: cannot be resolved") from error
        waiting = f"rank {started.rank}: waiting for {started.size} processes at "
        call_in_thread(lambda: _init_process_group(started), f"{waiting}{host}:{started.port}")
    return World(started.rank, started.size, started.restarts, launch)


def _init_process_group(started: Torchrun) -> None:
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    # after a restart the store still has the addresses of dead processes
    store = distributed.PrefixStore(f"start {started.restarts}", store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def call_in_thread(function: Callable[[], None], waiting: str) -> None:
    """Call a function that blocks in C++ in a thread: waiting for a thread, Python handles signals.

    Print `waiting` on stderr if it takes longer than `ANNOUNCE_SECONDS`.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=call, daemon=True)
    thread.start()
    thread.join(ANNOUNCE_SECONDS)
    if thread.is_alive():
        print(waiting, file=sys.stderr, flush=True)
        thread.join()
    if errors:
        raise errors[0]
