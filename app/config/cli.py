"""The command line: Hydra composes, pydantic checks, errors become a line and an exit code.

Imports no torch; the commands import the heavy modules when they run.
"""

import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
from app.config.errors import UserError, exit_codes, explain
from app.config.schema import SettingError, from_mapping, unknown_key

T = TypeVar("T")
PATHS = ("checkpoint", "data.root", "file", "input", "outputs", "resume")
SPECIAL = re.compile(r"[^\w\s/.$%*@?|:+-]", re.ASCII)  # needs quotes in Hydra's grammar


def hydra_main(
    config_name: str, schema: type[T]
) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Decorate a command: call it with conf/<config_name>.yaml and the command line as a `schema`.

    Errors and exit codes are those of `exit_codes`; `HYDRA_FULL_ERROR=1` adds the traceback.
    SIGTERM acts as Ctrl-C.
    """

    def decorate(task: Callable[[T], Any]) -> Callable[[], None]:
        full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"

        def job(cfg: DictConfig) -> Any:
            folder = swept_dir()
            if folder is None:
                with exit_codes(full_error):
                    return task(check(schema, cfg))
            try:
                return task(check(schema, cfg))
            except Exception as error:  # Hydra runs the others, then raises the first
                reason = " ".join(str(explain(error)).split())
                print(f"failed: {folder}: {reason}", file=sys.stderr, flush=True)
                raise

        @functools.wraps(task)
        def main() -> None:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
                # OpenMP's default spins for milliseconds, which stalls a busy machine
                os.environ["GOMP_SPINCOUNT"] = "20000"
            refused: tuple[type[Exception], ...] = (HydraException, OmegaConfBaseException)
            sweep = {"-m", "--multirun"} & set(sys.argv)
            if not sweep:  # a sweep needs Hydra's grammar
                sys.argv[1:] = map(quote_path, sys.argv[1:])
                refused = (*refused, ValueError)  # Hydra raises it, too
            with exit_codes(full_error):
                check_options(sys.argv[1:])
                if config_name != "train":
                    if sweep:
                        raise UserError("-m: sweeps are for app.train")
                    check_no_groups(config_name, sys.argv[1:])
                if sweep and int(os.environ.get("WORLD_SIZE", 1)) > 1:  # each rank would start one
                    raise UserError("-m: a sweep cannot run under torchrun")
                os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, where Hydra would print and exit
                try:
                    hydra.main("pkg://conf", config_name, version_base="1.3")(job)()
                except refused as error:
                    raise UserError(in_one_line(error)) from error
                finally:
                    os.environ["HYDRA_FULL_ERROR"] = "1" if full_error else "0"

        return main

    return decorate


def check(schema: type[T], cfg: DictConfig) -> T:
    """Build `schema` from what Hydra composed.

    Raises:
        UserError: A key is unknown or a value is not allowed.
    """
    typed = typed_overrides()
    for key, override in typed.items():
        if key in ("data.name", "model.name", "optim.name"):  # keeps the group's other values
            raise UserError(f"{override}: use {override.replace('.name', '', 1)}")
    try:
        return from_mapping(schema, OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:  # an interpolation
        raise UserError(in_one_line(error)) from error
    except SettingError as error:
        if error.key not in typed and "recipe" in typed:
            raise UserError(f"{typed['recipe']}: sets {error}") from error
        raise


def check_options(arguments: list[str]) -> None:
    """Raise a UserError for an option that Hydra does not have, in place of argparse's usage."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            get_args_parser().parse_args(arguments)
    except SystemExit as error:
        if not error.code:  # --version
            raise
        reason = printed.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{reason} (--help shows the options)") from error


def check_no_groups(command: str, arguments: list[str]) -> None:
    """Raise a UserError for a choice from a folder of conf/, such as data=digits."""
    for argument in arguments:
        key = argument.partition("=")[0]
        if key.isidentifier() and (Path(conf.__file__).parent / key).is_dir():
            raise UserError(f"{argument}: {command} has no group '{key}' (--help lists the keys)")


def in_one_line(error: Exception) -> str:
    """Return Hydra's message in one line that names the key and the allowed values."""
    message = " ".join(str(error).split()).partition(" Config search path:")[0]
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override}: expected KEY=VALUE (--help lists the keys)"
        return f"{error.override}: {message}"
    cause = error.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        return message
    if isinstance(cause.parent_node, DictConfig) and "not in struct" in str(cause):
        return f"{cause.full_key}: {unknown_key(map(str, cause.parent_node))}"
    return f"{message} {' '.join(str(cause).split())}"


def quote_path(argument: str) -> str:
    """Quote a path with characters that Hydra's grammar would parse, such as `IMG (1).png`."""
    key, _, path = argument.partition("=")
    if key not in PATHS or not path.strip() or path[0] in "'\"" or not SPECIAL.search(path):
        return argument
    # backslashes escape where a quote follows them, the closing one included
    quoted = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), path)
    return f"{key}='{quoted}'"


def typed_overrides() -> dict[str, str]:
    """Return the overrides of the command line by key or group; none outside of a command."""
    if not HydraConfig.initialized():
        return {}
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return {override.lstrip("+").partition("=")[0]: override for override in typed}


def swept_dir() -> Path | None:
    """Return the folder that Hydra made for this run of a sweep; None outside of a sweep."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    folder = Path(HydraConfig.get().runtime.output_dir)
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
