"""Command-line arguments: options, and overrides KEY=VALUE in Hydra's syntax."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import conf
from app.config.environment import read_torchrun
from app.config.errors import UserError
from app.config.schema import package_version

PATHS = (
    "checkpoint",
    "data.root",
    "file",
    "folder",
    "input",
    "outputs",
    "resume",
)  # settings with a path


class Parser(argparse.ArgumentParser):
    """A parser that raises UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError for wrong arguments."""
        raise UserError(f"{message} (--help shows the options)")


def hydra_parser(command: str) -> Parser:
    """Return a parser of overrides and of the options that Hydra carries out.

    Hydra's own parser cannot be built in Python 3.14; Hydra prints the help of this one.
    """
    parser = Parser(f"python -m app.{command}", allow_abbrev=False, add_help=False)
    add = parser.add_argument
    version = f"lenet-ops {package_version() or '(sources)'}"
    add("--version", action="version", version=version, help="print the version and exit")
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


def parse_arguments(
    parser: argparse.ArgumentParser, command: str, arguments: list[str]
) -> argparse.Namespace:
    """Parse the arguments of a command; raise a UserError if they are invalid."""
    options = parser.parse_intermixed_args(arguments)
    typed: dict[str, str] = {}
    for override in options.overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if not key or not equals or key.startswith("~"):
            raise UserError(f"{override}: expected KEY=VALUE (--help lists the keys)")
        if (first := typed.setdefault(key, override)) is not override:
            raise UserError(f"{first} {override}: set {key} once")
        if key == "hydra.run.dir":
            raise UserError(f"{override}: use outputs=FOLDER, the parent of the run folders")
        if command != "train" and is_group(key):
            raise UserError(f"{override}: {command} has no group '{key}' (--help lists the keys)")
        if is_group(key) and "/" in value:  # a file outside of the group
            names = sorted(file.stem for file in (Path(conf.__file__).parent / key).glob("*.yaml"))
            raise UserError(f"{override}: choose from {', '.join(names)}")
    if options.multirun and command != "train":
        raise UserError("-m: sweeps are for app.train")
    if options.multirun and read_torchrun().size > 1:  # one sweep per rank
        raise UserError("-m: a sweep cannot run under torchrun")
    options.overrides = [quote(item, options.multirun) for item in options.overrides]
    return options


def find_keys(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of settings and groups that equal `name` or end with `.name`."""
    groups = [group for group in settings if isinstance(settings[group], dict)]
    keys = [*settings, *(f"{group}.{key}" for group in groups for key in settings[group])]
    return [key for key in keys if key == name or key.endswith(f".{name}")]


def is_group(key: str) -> bool:
    """Return whether `key` is a config group (a folder in conf/), as `data` in data=digits."""
    return key.isidentifier() and (Path(conf.__file__).parent / key).is_dir()


def quote(override: str, sweep: bool) -> str:
    """Quote what Hydra would change or misread: paths such as `2026_11`, options such as `1`."""
    if not override.lstrip("+").startswith("hydra"):
        override = override.lstrip("+")  # all keys are in conf/: there is nothing to add
    key, _, value = override.partition("=")
    is_path = key in PATHS and value != "null" and not (sweep and re.search("[,(]", value))
    is_option = is_group(key) and (value == "null" or not value[:1].isalpha())
    if not (is_path or is_option) or not value.strip() or value[0] in "'\"":
        return override
    # backslashes before a quote (also the closing one) would escape it: double them
    quoted = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"{key}='{quoted}'"
