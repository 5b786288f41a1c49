import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C and SIGTERM back until the program is at a place where it can stop.

    Yields:
        A function that says whether a signal has come. A second signal raises KeyboardInterrupt
        at once.
    """
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield lambda: noted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
