"""The process of a command under closed streams, other locales, signals and deleted folders."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from app.config.process import handle_signals
from tests.app.config.test_cli import run_command

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

# a signal that comes just before a single long sleep would be handled after it
WAIT = "[time.sleep(0.05) for _ in range(1200)]"


def run_code(code, folder, redirection="", **environment):
    """Run code in `exit_codes` by a shell; return the process."""
    code = f"import os, sys\nfrom app.config.process import exit_codes\nwith exit_codes(): {code}"
    return subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
    )


def test_closed_stderr_is_discarded(tmp_path):
    code = "file = open('x', 'w'); print('note \\udcff \u2603', file=sys.stderr); "
    code += "os.write(2, b'from C'); "
    code += "from tqdm import tqdm; print(list(tqdm([1])))"
    done = run_code(code, tmp_path, "2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[1]\n", b"")
    assert (tmp_path / "x").read_text() == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_can_be_printed(tmp_path, encoding):
    (tmp_path / "file-ä-±").touch()
    (tmp_path / os.fsdecode(b"file-\xff")).touch()
    code = "[print(name, chr(0x2603)) for name in sorted(os.listdir())]"
    done = run_code(code, tmp_path, PYTHONIOENCODING=encoding, LC_ALL="C.UTF-8")
    assert (done.returncode, done.stderr) == (0, b"")
    first, second = done.stdout.splitlines()
    assert second.startswith(rb"file-\udcff ")
    assert first.startswith(
        {"ascii": rb"file-\xe4-\xb1 \u2603", "latin-1": "file-ä-± ".encode("latin-1")}.get(
            encoding, "file-ä-± ☃".encode()
        )
    )


@pytest.mark.parametrize("command", ["train", "predict", "export_onnx", "export_pt2", "report"])
def test_argument_in_another_encoding_is_a_usage_error(tmp_path, monkeypatch, command):
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    assert run_command(tmp_path, f"app.{command} outputs=ä") == (
        2,
        "error: 'outputs=\\udcc3\\udca4': is not in the locale's encoding, ascii "
        "(PYTHONUTF8=1 sets it to UTF-8)\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_text_that_a_file_cannot_hold_is_a_usage_error(tmp_path):
    code = r"open('x', 'w').write('first\nname: ' + os.fsdecode(b'\xff'))"
    done = run_code(code, tmp_path, LC_ALL="C.UTF-8")
    line = b"error: 'name: \\udcff': is not in the locale's encoding, utf-8\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_deleted_current_folder_is_a_usage_error(main, tmp_path, capsys):
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main() == 2
    line = "error: the current folder was deleted: change to another one\n"
    assert capsys.readouterr().err == line


def test_closed_terminal_interrupts(tmp_path):
    ours, terminal = pty.openpty()
    code = "import fcntl, termios, time; fcntl.ioctl(0, termios.TIOCSCTTY); "
    code += "print('ready', flush=True); " + WAIT
    code += "\n\n"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from app.config.process import exit_codes\nwith exit_codes(): {code}",
        ],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    assert os.read(ours, 5) == b"ready"
    os.close(ours)  # the kernel sends SIGHUP, and writing to the terminal fails
    assert process.wait(timeout=20) == 130


@pytest.mark.parametrize("milliseconds", [1, 10, 70, 200])
def test_two_signals_are_one_interrupt(milliseconds):
    """GNU timeout sends two; the second one may arrive while Python exits, here for 0.3 s."""
    code = "import atexit, time; atexit.register(time.sleep, 0.3); print('ready', flush=True); "
    code = f"from app.config.process import exit_codes\nwith exit_codes(): {code}{WAIT}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(milliseconds / 1000)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_signal_after_the_last_line_changes_nothing(tmp_path):
    """Python restores the default handlers of signals when it exits."""
    code = "from app.config.process import exit_codes\nwith exit_codes(): print('done')\n"
    code += "class Slow:\n  def __del__(self, wait=__import__('time').sleep): wait(0.5)\nx = Slow()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"done\n"
    time.sleep(0.2)  # in the destructor
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ignored_signals_stay_ignored(number):
    before = handle_signals()
    try:
        signal.signal(number, signal.SIG_IGN)
        assert number not in handle_signals()
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
