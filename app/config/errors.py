"""Errors that end a command with one line and an exit code."""

import errno
import io
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

INTERRUPTED, PIPE_CLOSED = 130, 141  # exit codes of a shell: 128 + SIGINT, SIGPIPE
# Seconds between a signal and the end of a launcher, in which its workers save their runs.
GRACE = 3.0
ROOT = Path(__file__).resolve().parents[2]  # in the source tree, the project's folder


class UserError(Exception):
    """Wrong usage: one line on stderr, exit code 2."""

    exit_code = 2


class RunError(Exception):
    """A correct command that could not finish: one line on stderr, exit code 1."""

    exit_code = 1


class WriteError(RunError):
    """A file could not be written: no space, no permission."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert the exit of argparse for wrong arguments to a UserError of one line."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as error:
        if not error.code:  # --help, --version
            raise
        reason = printed.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{reason} (--help shows the options)") from error


@contextmanager
def writing(name: object, kind: type[Exception] = WriteError, remedy: str = "") -> Iterator[None]:
    """Convert an OSError to an exception of `kind`: "`name`: cannot be written: reason`remedy`"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{name}: cannot be written: {error.strerror or error}{remedy}") from error


def check_writable(folder: Path, setting: str, remedy: str = "") -> None:
    """Make `folder`; raise a UserError that begins with `setting` if no file can be made in it."""
    from tempfile import TemporaryFile  # late: it would delay handle_signals()

    with writing(setting, UserError, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


def one_line(message: object) -> str:
    """Return a message without line feeds and repeated spaces."""
    return " ".join(str(message).split())


def missing_package(name: str) -> str:
    """Return the message for a missing package, with the command that installs it."""
    if not (ROOT / "pyproject.toml").is_file():
        return f"{name} is missing: `pip install 'lenet-ops[app,web]'`"
    environment, folder = ROOT / ".venv", os.path.relpath(ROOT)
    if not folder.startswith("."):
        folder = f"./{folder}"  # pip reads a bare name as a project on PyPI
    activate = f"source {shlex.quote(os.path.normpath(f'{folder}/.venv/bin/activate'))}"
    is_active = Path(sys.prefix).resolve() == environment.resolve()
    if (environment / "bin" / "activate").is_file() and not is_active:
        return f"{name} is missing: `{activate}`"
    set_up = f"bash {shlex.quote(os.path.normpath(f'{folder}/scripts/setup.sh'))} && {activate}"
    install = f"pip install --no-build-isolation '{folder}[app,web]'"
    return f"{name} is missing: `{set_up}`, or `{install}`"


def to_run_error(error: Exception) -> Exception:
    """Convert an expected failure to a RunError or UserError; return any other as it is."""
    if isinstance(error, ImportError) and error.name == "ops":  # not compiled
        return RunError(str(error))
    if isinstance(error, ModuleNotFoundError) and "." not in str(error.name):
        return UserError(missing_package(str(error.name)))
    if isinstance(error, OSError) and error.strerror:
        full = error.errno == errno.ENOSPC
        where = error.filename or ("standard output or the temporary folder" if full else "")
        return RunError(f"{where}: {error.strerror}" if where else error.strerror)
    return error


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; exit at once during an import, which cannot be unwound safely."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def interrupt_after_grace(number: int, frame: FrameType | None) -> None:
    """Call `interrupt` after `GRACE` seconds; at a second signal, at once."""
    signal.signal(number, interrupt)
    time.sleep(GRACE)
    interrupt(number, frame)


def handle_signals(handler: Callable[[int, FrameType | None], None] = interrupt) -> None:
    """Install `handler` for SIGINT and SIGTERM, except where the process inherited SIG_IGN."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def is_first(message: str) -> bool:
    """Return whether this is the first call with `message` in a torchrun launch with restarts.

    Return True also without torchrun or if its store fails.
    """
    with suppress(Exception):
        if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":  # KeyError without torchrun
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
            return store.add(f"printed: {message}", 1) == 1
    return True


@contextmanager
def exit_codes(full_error: bool = False) -> Iterator[None]:
    """End the command with an exit code and a line on stderr if the block raises.

    Install signal handlers (`handle_signals`), which stay after the block.

    Exit codes: 2 wrong usage, 1 failure, 130 interrupted, 141 output pipe closed (prints nothing).
    `full_error` prints the traceback of expected errors, too. Under torchrun, one process prints a
    UserError, once for all restarts.
    """
    handle_signals()
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # else the flush at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    except Exception as error:
        converted = to_run_error(error)
        expected = isinstance(converted, UserError | RunError)
        if full_error or not expected:
            import traceback  # late: importing it would delay handle_signals()

            traceback.print_exception(error)
        if expected and (isinstance(converted, RunError) or is_first(str(converted))):
            print("error:", str(converted).replace("\n", "\\n"), file=sys.stderr)
        sys.exit(getattr(converted, "exit_code", 1))
