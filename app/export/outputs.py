"""Files of an export: checks of their paths before it, writes after it."""

import os
from collections.abc import Mapping
from pathlib import Path

from app.config.errors import UserError, check_writable
from app.runs.files import write_atomically


def check_files(cards: Mapping[Path, Path], suffix: str, typed: bool) -> None:
    """Make the folder of files with the card of each.

    Raise a UserError if a path is unusable or another file would be overwritten. `suffix` is that
    of the files and of the targets of symbolic links; `typed`: the first path is `file=`.
    """
    path = next(iter(cards))
    if path.suffix != suffix:
        raise UserError(f"file={path}: must end with {suffix}")
    setting, remedy = f"file={path}", ""
    if not typed:
        setting, remedy = f"checkpoint={path.parent}", "; choose another path with file=..."
    check_writable(path.parent, setting, remedy)
    targets = [os.path.realpath(file) for file in cards]
    if len({*targets}) < len(targets):
        raise UserError(f"file={path}: both layouts would be written to {targets[0]}")
    if wrong := [target for target in targets if not target.endswith(suffix)]:
        raise UserError(f"file={path}: links to {wrong[0]}, which must end with {suffix}")
    for file, card in cards.items():
        for output in (file, card):
            if output.is_dir():
                raise UserError(f"file={path}: {output} is a folder")
        if card.is_fifo():
            raise UserError(f"file={path}: {card} is not a regular file")
        if card.exists() and not card.read_bytes().startswith(f"# {file.name}\n".encode()):
            raise UserError(f"file={path}: {card} is not a model card and would be overwritten")


def write_with_card(file: Path, content: bytes, card: Path, text: str) -> None:
    """Write a file, or the target of a symbolic link, and its card."""
    write_atomically(os.path.realpath(file), content)
    write_atomically(card, text.encode())
