import os
import signal

import pytest

from app.interrupt import deferred_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_check(number):
    before = signal.getsignal(number)
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as interrupted:
        interrupted()
        os.kill(os.getpid(), number)
        reached.append("after the signal")
        interrupted()
        reached.append("after the check")
    assert reached == ["after the signal"]
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_wait():
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was held back")
