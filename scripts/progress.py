"""Run a command with its output in a log; show the elapsed time and the file that ninja compiles.

    python scripts/progress.py TITLE LOG COMMAND...

A terminal shows one line, rewritten in place; a pipe gets a line every 15 s. If the command fails,
print the first error in its output and the log's path, and exit with the command's status.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import TextIO

PIPE_INTERVAL = 15.0  # seconds
TERMINAL_INTERVAL = 0.5
ERROR_LINES = 6  # an error and the source lines that a compiler shows below it
LAST_LINES = 20  # shown if no line matches _ERROR

_COMPILED = re.compile(r"\[(\d+)/(\d+)\] .*/ops/(\S+\.(?:cpp|cu)) ")  # a line of ninja -v
_LIBRARY = re.compile(r"building '(?:\w+\.)*(\w+)' extension")  # a line of setuptools
_ERROR = re.compile(r"(?:^|[\s)])(?:fatal )?error(?: #[\w-]+)?: |^ERROR: ", re.MULTILINE)
_REMARK = re.compile(r"^\s*(lenet-ops: .+)$", re.MULTILINE)  # printed by setup.py


class Status:
    """Library and source file that a build is compiling, parsed from its output."""

    def __init__(self) -> None:
        self._library = ""
        self._file = ""

    def read(self, line: str) -> None:
        """Parse a line of the output."""
        if library := _LIBRARY.search(line):
            self._library, self._file = f" {library[1]}", ""
        elif compiled := _COMPILED.search(line):
            self._file = f" [{compiled[1]}/{compiled[2]}] {compiled[3]}"

    def __str__(self) -> str:
        return self._library + self._file


def first_error(log: str) -> str:
    """Return the first error in `log` with the lines below it, or the last lines."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if _ERROR.search(line):
            below = lines[number : number + ERROR_LINES]
            shown = takewhile(lambda line: "ninja: build stopped" not in line, below)
            return dedent("\n".join(shown))
    return "\n".join(lines[-LAST_LINES:])


def remarks(log: str) -> list[str]:
    """Return setup.py's messages, without duplicates."""
    return list(dict.fromkeys(_REMARK.findall(log)))


def follow(lines: Iterable[str], log: TextIO, status: Status) -> None:
    """Copy `lines` into `log` and keep `status` up to date."""
    for line in lines:
        log.write(line)
        status.read(line)


class Display:
    """Progress line on a terminal, or progress lines in a pipe."""

    def __init__(self, title: str, out: TextIO) -> None:
        self._title = title
        self._out = out
        self._terminal = out.isatty()
        self._start = time.monotonic()
        self.interval = TERMINAL_INTERVAL if self._terminal else PIPE_INTERVAL
        self._write(f"{title} ...")

    def update(self, status: object) -> None:
        """Show `status` and the elapsed time."""
        self._write(f"{self._title}{status} … {self._seconds()} s")

    def finish(self, result: str = "") -> None:
        """Show `result`, or the elapsed time."""
        self._write(f"{self._title}: {result or f'{self._seconds()} s'}")
        if self._terminal:
            self._out.write("\n")

    def _seconds(self) -> int:
        return round(time.monotonic() - self._start)

    def _write(self, line: str) -> None:
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            self._out.write(f"\r\033[K{line[: columns - 1]}")
        else:
            self._out.write(f"{line}\n")
        self._out.flush()


def run(title: str, log: Path, command: Sequence[str], out: TextIO) -> int:
    """Run `command` and return its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    display, status = Display(title, out), Status()
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        display.finish("failed")
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    with log.open("w", encoding="utf-8") as file:
        reader = threading.Thread(target=follow, args=(process.stdout, file, status))
        reader.start()
        try:
            _wait(reader, lambda: display.update(status), display.interval)
        except KeyboardInterrupt:  # the command got SIGINT, too
            display.finish("interrupted")
            return 130
        finally:
            reader.join()
    returncode = process.wait()
    text = log.read_text(encoding="utf-8")
    display.finish("failed" if returncode else "")
    for remark in remarks(text):
        out.write(f"  {remark}\n")
    out.flush()
    if returncode:
        print(first_error(text), file=sys.stderr)
        print(f"error: {title} failed: all of its output is in {log}", file=sys.stderr)
    return returncode if returncode >= 0 else 128 - returncode


def _wait(reader: threading.Thread, update: Callable[[], None], interval: float) -> None:
    while True:
        reader.join(interval)
        if not reader.is_alive():
            return
        update()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: progress.py TITLE LOG COMMAND...")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:], sys.stdout))
