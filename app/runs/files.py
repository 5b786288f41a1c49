"""Atomic writes, and CSV."""

import csv
import io
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.config.errors import writing


def write_atomically(path: str | Path, content: bytes | memoryview) -> None:
    """Replace a file, so that readers see the old content or the new one, never a part of it.

    Safe for several writers at once: each has a temporary file of its own, the last one wins. If
    it fails, it raises a WriteError, and the old file is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with writing(path):
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the rename survives a power failure
            os.close(folder)
    finally:
        with suppress(OSError):  # gone after the rename; on a read-only file system, never there
            temporary.unlink()


def remove_temporaries(path: Path) -> None:
    """Remove the temporary files of writers of `path` that were killed."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def csv_text(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()
