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
    """Replace a file atomically; on failure raise a WriteError and keep the old file."""
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
            os.fsync(folder)  # makes the rename durable
            os.close(folder)
    finally:
        with suppress(OSError):  # missing after the rename or on a read-only file system
            temporary.unlink()


def csv_text(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()
