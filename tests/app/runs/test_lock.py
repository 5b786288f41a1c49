"""The lock of a run, also on file systems without locks."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from app.config.errors import UserError, WriteError
from app.config.schema import TrainConfig
from app.runs.folder import MARKER, create_run_folder, locked

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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks(folder, monkeypatch, recwarn, number):
    fail_with(monkeypatch, number)
    remedy = rf" \(if that was killed on another machine, delete {folder / MARKER}\)$"
    for _ in range(2):
        with locked(folder), pytest.raises(UserError, match=GOING_ON + remedy), locked(folder):
            pass
    assert not recwarn.list


def test_marker_of_a_killed_process_is_void(folder, monkeypatch):
    fail_with(monkeypatch, errno.ENOLCK)
    code = "import os, sys, filelock; lock = filelock.SoftFileLock(sys.argv[1]); lock.acquire()"
    subprocess.run([sys.executable, "-c", f"{code}; os._exit(0)", folder / MARKER], check=True)
    assert (folder / MARKER).exists()
    with locked(folder):
        pass


def test_other_errors_are_raised(folder, monkeypatch):
    fail_with(monkeypatch, errno.EIO)
    with pytest.raises(WriteError, match="cannot be written: Input/output error"), locked(folder):
        pass
