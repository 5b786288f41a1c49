import os
import signal

import pytest

from app.training.trainer import deferred_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_deferred(number):
    before = signal.getsignal(number)
    with deferred_interrupt() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()
    assert signal.getsignal(number) is before


def test_second_signal_interrupts():
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was held back")
