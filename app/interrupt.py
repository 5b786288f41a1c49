import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C and SIGTERM back until the program is at a place where it can stop.

    Yields:
        A function that raises KeyboardInterrupt if a signal has come. A second signal does not
        wait for it.
    """
    noted = False

    def check() -> None:
        if noted:
            raise KeyboardInterrupt

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        check()
        noted = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield check
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
