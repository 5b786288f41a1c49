import os
import signal

import pytest

from app.training.trainer import deferred_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_it_is_asked_for(number):
    before = signal.getsignal(number)
    with deferred_interrupt() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), number)
        assert interrupted()
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_wait():
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was held back")
