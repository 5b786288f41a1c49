"""scripts/progress.py: ninja's counts, first error, log."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.progress import Display, Status, first_error, remarks, run

SCRIPT = Path(__file__).parents[2] / "scripts" / "progress.py"
COMPILED = "[3/8] c++ -MMD -MF /x/gelu.o.d -I/x/ops -c -c /x/ops/gelu/cpu.cpp -o /x/gelu.o -O3"
NVCC = "  [12/27] /x/bin/nvcc --generate-dependencies -c /x/ops/gelu/cuda.cu -o /x/cuda.o -O3"


def shown(*lines):
    status = Status()
    for line in lines:
        status.read(line)
    return str(status)


def test_status_shows_counts_and_file():
    assert shown() == ""
    assert shown(COMPILED) == " [3/8] gelu/cpu.cpp"
    assert shown(COMPILED, "g++ -shared -o ops/_C.so", NVCC) == " [12/27] gelu/cuda.cu"


def test_status_names_the_library():
    line = "building 'ops._C_cuda' extension"
    assert shown(COMPILED, line) == " _C_cuda"
    assert shown(COMPILED, line, NVCC) == " _C_cuda [12/27] gelu/cuda.cu"


@pytest.mark.parametrize(
    "error",
    [
        "/x/ops/gelu/cpu.cpp:12:3: error: 'y' was not declared in this scope",
        "/x/ops/core/check.h:1:10: fatal error: torch/x.h: No such file or directory",
        "/x/ops/gelu/cuda.cu(73): error: identifier 'y' is undefined",
        "/x/ops/gelu/cuda.cu(73): error #20-D: identifier 'y' is undefined",
        "error: building lenet-ops needs torch >= 2.10, this is 2.9.0",
        "ERROR: No matching distribution found for torch==9",
    ],
)
def test_first_error(error):
    later = "error: subprocess-exited-with-error"
    command = "c++ -Werror -Wno-error=x -c error.cpp"
    log = "\n".join([command, "warning: z", error, *"123456789", later])
    assert first_error(log).splitlines() == [error, *"12345"]


def test_first_error_ends_with_the_compilers_output():
    log = (
        "  x.cpp:1:1: error: y\n    1 | y\n  ninja: build stopped: subcommand failed.\n  Traceback"
    )
    assert first_error(log) == "x.cpp:1:1: error: y\n  1 | y"


def test_first_error_falls_back_to_last_lines():
    assert first_error("\n".join(map(str, range(100)))) == "\n".join(map(str, range(80, 100)))


def test_remarks_of_setup_py_are_shown_once():
    line = "  lenet-ops: building for the CPU only: no CUDA toolkit"
    assert remarks(f"a\n{line}\nb\n{line}\n") == [line.strip()]


def python(code):
    return [sys.executable, "-c", code]


def progress(tmp_path, code, **options):
    command = [sys.executable, SCRIPT, "Building", tmp_path / "new" / "log", *python(code)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_success_in_a_pipe(tmp_path):
    done = progress(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    assert done.returncode == 0
    assert re.fullmatch(r"Building \.\.\.\nBuilding: \d+ s\n", done.stdout)
    assert done.stderr == ""
    assert sorted((tmp_path / "new" / "log").read_text().split()) == ["err", "out"]


def test_failure_shows_the_first_error_and_the_log(tmp_path):
    code = "print('x.cpp:1:1: error: first\\n  1 | x\\nx.cpp:2:1: error: second'); exit(3)"
    failed = progress(tmp_path, code)
    assert failed.returncode == 3
    assert failed.stdout.splitlines()[-1] == "Building: failed"
    lines = failed.stderr.splitlines()
    assert lines[0] == "x.cpp:1:1: error: first"
    assert lines[-1].endswith(f"is in {tmp_path / 'new' / 'log'}")


def test_missing_command(tmp_path, capsys):
    assert run("Building", tmp_path / "log", ["/no/such/command"], sys.stdout) == 127
    assert capsys.readouterr().err == "error: /no/such/command: No such file or directory\n"


def test_killed_command(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert progress(tmp_path, code).returncode == 128 + 9


def test_pipe_gets_a_line_an_interval(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.progress.PIPE_INTERVAL", 0.2)
    code = f"import time; print({COMPILED!r}, flush=True); time.sleep(1.5)"
    assert run("Building", tmp_path / "log", python(code), sys.stdout) == 0
    first, *updates, last = capsys.readouterr().out.splitlines()
    assert first == "Building ..."
    assert len(updates) >= 2
    assert updates[-1].startswith("Building [3/8] gelu/cpu.cpp … ")
    assert last.startswith("Building: ")


def test_terminal_gets_one_line_in_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        display = Display("Building", terminal)
        display.update(" [3/8] gelu/cpu.cpp" + "x" * 100)
        display.finish()
        written = ""
        while "\n" not in written:  # a terminal returns partial reads
            written += os.read(ours, 4096).decode()
    os.close(ours)
    first, update, last = written.split("\r\033[K")[1:]
    assert first == "Building ..."
    assert update.startswith("Building [3/8] gelu/cpu.cpp")
    assert len(update) == 39  # a wrapped line could not be rewritten
    assert re.fullmatch(r"Building: \d+ s\r\n", last)
