"""The lock of a run, also on file systems without locks."""

import errno
import fcntl
import os
import threading

import pytest

from app.config.errors import UserError, WriteError
from app.config.schema import TrainConfig
from app.runs.folder import LOCK, create_run_folder, locked

GOING_ON = "the run is going on in another process"


@pytest.fixture
def folder(tmp_path):
    return create_run_folder(TrainConfig(outputs=str(tmp_path)))


def fail_with(monkeypatch, number):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_lock_is_exclusive(folder):
    for _ in range(2):
        with locked(folder), pytest.raises(UserError, match=f"{GOING_ON}$"), locked(folder):
            pass


def test_report_does_not_stop_a_run_from_starting(folder):
    """Hold the lock for an instant, as `is_running` of another process does."""
    with locked(folder):
        pass
    with (folder / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        release = threading.Timer(0.01, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        with locked(folder):
            pass
        release.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks(folder, monkeypatch, number):
    fail_with(monkeypatch, number)
    for _ in range(2):
        with locked(folder):
            pass


def test_other_errors_are_raised(folder, monkeypatch):
    fail_with(monkeypatch, errno.EIO)
    with pytest.raises(WriteError, match="cannot be written: Input/output error"), locked(folder):
        pass
