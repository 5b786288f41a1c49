"""A thread that answers requests in order, without blocking the event loop."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Worker:
    """A thread that runs calls one after the other, in the order in which they were made.

    It is a daemon: the process does not wait for it to end.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, or raise its exception."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: a single image gains nothing from a second core
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
