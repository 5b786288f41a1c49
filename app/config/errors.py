"""The exceptions that commands print as one line, and how they end when nobody reads."""

import os
import sys
from argparse import ArgumentParser
from typing import NoReturn

UNREAD = 141  # exit code after SIGPIPE, as shells have it


class UserError(Exception):
    """Wrong usage. Commands print it as one line, `error: ...`, and exit with 2."""

    exit_code = 2


class RunError(Exception):
    """A correct command that could not finish. Commands print one line and exit with 1."""

    exit_code = 1


class WriteError(RunError):
    """A file could not be written: no space, no permission."""


def refuse_usage(parser: ArgumentParser, message: str) -> NoReturn:
    """In place of `ArgumentParser.error`, which prints several lines."""
    raise UserError(f"{message} (--help shows what there is)")


def open_closed_outputs() -> None:
    """Give print a place to write to, where the process was started without stdout or stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115


def end_unread() -> NoReturn:
    """End the process after a BrokenPipeError of stdout, whose reader (`head`) has had enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
    sys.exit(UNREAD)
