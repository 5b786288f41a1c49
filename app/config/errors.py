"""Errors that end a command with one line, and the conversion of expected failures to them."""

import errno
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Messages of the CPU allocator, CUDA, cuBLAS, and ONNX Runtime.
OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|CUDA (error: )?out of memory|ALLOC_FAILED|bad_alloc|allocate memory"
)
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
def writing(name: object, kind: type[Exception] = WriteError, remedy: str = "") -> Iterator[None]:
    """Convert an OSError to an exception of `kind`: "`name`: cannot be written: reason`remedy`"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{name}: cannot be written: {error.strerror or error}{remedy}") from error


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Convert an OSError to a UserError: "`name`: cannot be read: reason"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from error


def check_writable(folder: Path, setting: str, remedy: str = "") -> None:
    """Make `folder`; raise a UserError that begins with `setting` if no file can be made in it."""
    from tempfile import TemporaryFile  # late: it would delay handle_signals()

    with writing(setting, UserError, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


def one_line(message: object) -> str:
    """Collapse all whitespace in `message` to single spaces."""
    return " ".join(str(message).split())


def missing_package(name: str) -> str:
    """Return the message for a missing package, with the command that installs it."""
    install = "pip install 'lenet-ops[app]'"
    if (ROOT / "pyproject.toml").is_file():  # the sources
        folder = shlex.quote(str(ROOT))
        install = f"cd {folder} && bash scripts/setup.sh && source .venv/bin/activate"
    return f"{name} is missing: `{install}`"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory could not be allocated, on the CPU or a GPU."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return known or bool(OUT_OF_MEMORY.search(str(error)))


def _cause_of(error: BaseException) -> BaseException | None:
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return error.__cause__ or error.__context__  # torch.compile raises them `from None`
    return error.__cause__


def to_run_error(error: Exception) -> Exception:
    """Convert an expected failure to a RunError or UserError; return any other as it is."""
    if isinstance(error, UserError | RunError):
        return error
    if isinstance(error, ImportError) and error.name == "ops":  # not compiled
        return RunError(str(error))
    if isinstance(error, ModuleNotFoundError) and "." not in str(error.name):
        return UserError(missing_package(str(error.name)))
    if isinstance(error, UnicodeEncodeError):
        text = error.object[: error.end].rpartition("\n")[2]
        encoding = sys.getfilesystemencoding()
        remedy = "" if encoding == "utf-8" else " (PYTHONUTF8=1 sets it to UTF-8)"
        return UserError(f"{text!a}: is not in the locale's encoding, {encoding}{remedy}")
    causes: list[BaseException] = [error]
    while cause := _cause_of(causes[-1]):
        causes.append(cause)
    for cause in causes:
        if is_out_of_memory(cause):
            first_line = str(cause).partition("\n")[0]  # C++ frames may follow
            reason = first_line.rpartition("DefaultCPUAllocator: ")[2]
            return RunError(f"out of memory: {reason}".removesuffix(": "))
        full = isinstance(cause, OSError) and cause.errno == errno.ENOSPC
        if isinstance(cause, OSError) and cause.strerror and (full or cause is error):
            where = cause.filename or ("standard output or the temporary folder" if full else "")
            kind = UserError if isinstance(cause, PermissionError) else RunError
            return kind(f"{where}: {cause.strerror}" if where else cause.strerror)
    return error
