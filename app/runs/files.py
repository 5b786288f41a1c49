import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from app.config.errors import WriteError


def write_atomically(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file so that `path` is at every moment the old one or the whole new one.

    Raises:
        WriteError: It cannot be written (no space, no permission); the old one is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # one left by a killed run is overwritten
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # a file system that is read-only refuses this, too
            temporary.unlink()
        raise WriteError(f"{path}: cannot be written: {error.strerror}") from error


def print_and_write(text: str, folder: Path, files: Mapping[str, bytes], told: TextIO) -> None:
    """Print a text and write files, these even where nobody reads it any more.

    Args:
        text: For stdout.
        folder: Of the files.
        files: Contents by name.
        told: Where it says what has been written.

    Raises:
        WriteError: A file cannot be written; the text has been printed.
    """
    try:
        print(text, end="", flush=True)
    finally:
        for name, content in files.items():
            write_atomically(folder / name, content)
    for name in files:
        print(f"wrote {folder / name}", file=told)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlive a power failure, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
