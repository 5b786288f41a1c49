"""The process of a command: standard streams, signals, exit codes."""

import atexit
import io
import math
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from app.config.errors import RunError, UserError, to_run_error

INTERRUPTED, PIPE_CLOSED = 130, 141  # exit codes of a shell: 128 + SIGINT, SIGPIPE
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT = 0.5  # seconds in which further signals are the same: GNU timeout sends two


def open_streams() -> None:
    """Replace closed standard streams by /dev/null; escape characters that the encoding lacks.

    Otherwise `print(file=sys.stderr)` writes to stdout, and an opened file gets descriptor 2.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, mode)  # noqa: SIM115, PTH123 (gets the stream's number)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_terminal() -> None:
    """Replace the streams of a closed terminal by /dev/null: writing to them would fail."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
            os.dup2(null, number)
    os.close(null)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; exit at once during an import, which cannot be unwound safely."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def handle_signals(handler: Callable[[int, FrameType | None], None] = interrupt) -> dict[int, Any]:
    """Install `handler` for `STOP_SIGNALS`, except ignored ones; return the previous handlers.

    A shell script ignores SIGINT in background processes, nohup ignores SIGHUP.
    """
    last = -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() < last + REPEAT:
            return
        last = time.monotonic()
        if number == signal.SIGHUP:
            discard_terminal()
        handler(number, frame)

    previous: dict[int, Any] = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, handle)
    return previous


def ignore_signals() -> None:
    """Ignore `STOP_SIGNALS`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_first(message: str) -> bool:
    """Return whether no process of this torchrun launch has passed `message` before."""
    with suppress(Exception):
        if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":  # KeyError without torchrun
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
            return store.add(f"printed: {message}", 1) == 1
    return True


def check_surroundings() -> None:
    """Raise an error if the current folder was deleted or an argument cannot be encoded."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UserError("the current folder was deleted: change to another one") from error
    for argument in sys.argv[1:]:
        argument.encode()  # UnicodeEncodeError


def flush_output() -> None:
    """Flush stdout; if that fails, discard what it holds: Python would flush it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        raise


@contextmanager
def exit_codes(full_error: bool = False) -> Iterator[None]:
    """End the command with an exit code and a line on stderr if the block raises.

    Exit codes: 2 wrong usage or unusable input, 1 failure, 130 interrupted, 141 output pipe closed
    (prints nothing). `full_error` also prints the traceback of expected errors. Signal handlers
    stay installed after the block.
    """
    open_streams()
    handle_signals()
    try:
        check_surroundings()
        try:
            yield
        except SystemExit:  # --help
            flush_output()
            raise
        flush_output()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        code = PIPE_CLOSED
    except Exception as error:
        converted = to_run_error(error)
        expected = isinstance(converted, UserError | RunError)
        if full_error or not expected:
            import traceback  # late: importing it would delay handle_signals()

            traceback.print_exception(error)
        if expected and (isinstance(converted, RunError) or is_first(str(converted))):
            print("error:", str(converted).replace("\n", "\\n"), file=sys.stderr)
        code = getattr(converted, "exit_code", 1)
    else:
        return
    finally:  # at exit Python restores the default handlers, which would kill it
        atexit.register(ignore_signals)
    with suppress(OSError):
        flush_output()
    sys.exit(code)
