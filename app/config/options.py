"""Options of the commands. Does not import Hydra, whose own parser Python 3.14 refuses to build."""

import argparse
from typing import Any, NoReturn

from app.config.errors import UserError
from app.config.schema import package_version


class Parser(argparse.ArgumentParser):
    """A parser with --version, without abbreviations, that raises UserErrors."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"python -m app.{command}", allow_abbrev=False, **options)
        version = f"lenet-ops {package_version() or '(sources)'}"
        help = "print the version and exit"
        self.add_argument("--version", action="version", version=version, help=help)

    def error(self, message: str) -> NoReturn:
        """Raise a UserError for wrong arguments."""
        raise UserError(f"{message} (--help shows the options)")


def hydra_parser(command: str) -> Parser:
    """Return a parser of overrides and of the options that Hydra carries out."""
    parser = Parser(command, add_help=False)  # Hydra prints the help
    add = parser.add_argument
    add("overrides", nargs="*", help="settings, KEY=VALUE")
    add("--help", "-h", action="store_true", help="print the groups and settings, and exit")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true", help="run each combination: a sweep")
    mode.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="print settings, exit")
    # Hydra reads its other options, too
    for name in ("config_dir", "config_name", "config_path", "info", "package"):
        parser.set_defaults(**{name: None})
    parser.set_defaults(hydra_help=False, resolve=False, run=False, shell_completion=False)
    return parser
