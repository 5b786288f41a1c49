"""Atomic writes: concurrent processes, killed writers, errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import app.runs.files
from app.config.errors import WriteError
from app.runs.files import write_atomically

WRITER = """
import sys
from app.runs.files import write_atomically
for number in range(20):
    write_atomically(sys.argv[1], sys.argv[2].encode() * 100_000)
"""


def test_concurrent_writes_are_atomic(tmp_path):
    path = tmp_path / "predictions.csv"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter], stderr=subprocess.PIPE)
        for letter in "abcd"
    ]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = path.read_bytes()
            assert content == content[:1] * 100_000
    assert [(writer.returncode, writer.stderr.read()) for writer in writers] == [(0, b"")] * 4
    assert list(tmp_path.iterdir()) == [path]


def test_folder_is_synced_after_the_rename(tmp_path, monkeypatch):
    calls = []
    replace, fsync = Path.replace, os.fsync

    def traced_fsync(descriptor):
        calls.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    monkeypatch.setattr(app.runs.files.os, "fsync", traced_fsync)
    monkeypatch.setattr(
        Path, "replace", lambda self, target: calls.append("rename") or replace(self, target)
    )
    write_atomically(tmp_path / "last.pt", b"content")
    (_, temporary), *rest = calls
    assert temporary.startswith(str(tmp_path / ".last.pt."))
    assert rest == ["rename", ("fsync", str(tmp_path))]


def test_missing_folder_is_a_write_error(tmp_path):
    with pytest.raises(WriteError, match="cannot be written: No such file or directory"):
        write_atomically(tmp_path / "nowhere" / "last.pt", b"")
