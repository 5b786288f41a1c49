import os
import signal

import pytest

from app.config import process
from app.training.trainer import deferred_interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_deferred(number):
    def ignore(*arguments):
        pass

    before = signal.signal(number, ignore)
    try:
        with deferred_interrupt() as interrupted:
            assert not interrupted()
            os.kill(os.getpid(), number)
            assert interrupted()
        assert signal.getsignal(number) is ignore
    finally:
        signal.signal(number, before)


def test_second_signal_interrupts(monkeypatch):
    with deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # as GNU timeout does
    monkeypatch.setattr(process, "REPEAT", 0.0)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was held back")


@pytest.mark.parametrize("number", SIGNALS)
def test_ignored_signal_stays_ignored(number):
    """Do not stop a run under nohup when its terminal is closed."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with deferred_interrupt() as interrupted:
            os.kill(os.getpid(), number)
            assert not interrupted()
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
