"""Command line, without torch: Hydra composes the configuration, pydantic validates it."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any, TypeVar

import hydra
import hydra.version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import _run_hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from app.config.arguments import find_keys, hydra_parser, parse_arguments
from app.config.errors import RunError, UserError, one_line, to_run_error
from app.config.process import exit_codes
from app.config.schema import from_mapping, unknown_key

T = TypeVar("T")


def command(name: str, schema: type[T]) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Return a decorator: it turns a function of an instance of `schema` into a command."""
    return lambda task: functools.partial(run_command, name, schema, task)


def run_command(name: str, schema: type[T], task: Callable[[T], Any]) -> None:
    """Call `task` with the configuration of a command from conf/<name>.yaml and the overrides.

    A sweep calls it once a run. `HYDRA_FULL_ERROR=1` adds the traceback to errors.
    """
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # by default OpenMP threads spin for milliseconds, which stalls a busy machine
        os.environ["GOMP_SPINCOUNT"] = "20000"
    # torch logs each attempt to connect to another process, with C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with exit_codes(full_error):
        parser = hydra_parser(name)
        options = parse_arguments(parser, name, sys.argv[1:])
        hydra.version.setbase("1.3")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, not print and exit
        try:
            if options.multirun and not options.help:
                check_sweep(name, schema, options.overrides)
                # killed workers of a launcher leave semaphores to the tracker, which frees them
                os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
            _run_hydra(
                options,
                parser,
                lambda composed: run_task(schema, task, full_error, composed),
                "pkg://conf",
                name,
            )
        except Exception as error:
            typed = [item for item in sys.argv[1:] if item.startswith("hydra")]
            message = "" if "of_run" in vars(error) else hydra_message(error, typed)
            if not message:
                raise
            raise (RunError if isinstance(error, BrokenExecutor) else UserError)(message) from error
        finally:
            os.environ["HYDRA_FULL_ERROR"] = "1" if full_error else "0"


def run_task(
    schema: type[T], task: Callable[[T], Any], full_error: bool, composed: DictConfig
) -> Any:
    """Call `task`; report the error of a swept run, which Hydra raises after all runs."""

    def run() -> Any:
        return task(build_config(schema, composed, typed_overrides()))

    folder = swept_dir()
    if folder is None:
        with exit_codes(full_error):  # here: `run_command` takes a ValueError for Hydra's
            return run()
    try:
        return run()
    except Exception as error:
        reason = one_line(to_run_error(error))
        print(f"failed: {folder}: {reason}", file=sys.stderr, flush=True)
        vars(error)["of_run"] = True  # survives pickling in a launcher's worker
        raise


def check_sweep(name: str, schema: type[T], overrides: list[str]) -> None:
    """Raise a UserError if a run of the sweep has a wrong setting, or the folder of another."""
    # other sweepers than Hydra's basic one choose settings while they run
    if any(item.startswith("hydra/sweeper=") for item in overrides):
        return
    with hydra.initialize_config_module("conf", version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
        folders = set()
        for number, job in enumerate(jobs):
            cfg = hydra.compose(name, job, return_hydra_config=True)
            with open_dict(cfg), read_write(cfg.hydra):
                cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
                folders.add(cfg.hydra.sweep.subdir)
                cfg.pop("hydra")
            build_config(schema, cfg, by_key(job))
        if len(folders) < len(jobs):
            raise UserError("hydra.sweep.subdir: runs would share a folder, add ${hydra.job.num}")


def build_config(schema: type[T], cfg: DictConfig, typed: dict[str, str]) -> T:
    """Build `schema` from Hydra's configuration; raise a UserError for a wrong key or value."""
    for key, override in typed.items():
        # it would change the name and keep the values of the group's default
        if key in ("data.name", "model.name", "optim.name"):
            raise UserError(f"{override}: use {override.replace('.name', '', 1)}")
    try:
        return from_mapping(schema, OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:  # a wrong interpolation
        raise UserError(hydra_message(error)) from error


def hydra_message(error: Exception, typed: Sequence[str] = ()) -> str:
    """Return Hydra's message in one line, or "" for other errors.

    `typed` are arguments that configure Hydra: they cause its other exceptions.
    """
    message = one_line(error).partition(" Config search path:")[0]
    if not isinstance(error, HydraException | OmegaConfBaseException):
        if isinstance(error, OSError | UserError):
            return ""
        if typed:
            return f"{' '.join(typed)}: {message or type(error).__name__}"
        return message if isinstance(error, ValueError) else ""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be parsed, a quote or bracket may be open"
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        plugin = ", or install its plug-in" if group.startswith("hydra/") else ""
        return f"{group}={option}: choose from {', '.join(error.options)}{plugin}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if not isinstance(cause, OmegaConfBaseException):
        return message
    reason = one_line(cause).partition(" full_key:")[0]
    unknown = isinstance(cause, ConfigAttributeError | ConfigKeyError)
    if unknown and isinstance(cause.parent_node, DictConfig):
        keys: Any = OmegaConf.to_container(cause.parent_node, resolve=False)
        nested = find_keys(str(cause.key), {k: v for k, v in keys.items() if k != "hydra"})
        reason = unknown_key(str(cause.full_key), keys)
        if nested:
            reason = f"unknown key, did you mean {nested[0]}?"
    return f"{cause.full_key}: {reason}"


def typed_overrides() -> dict[str, str]:
    """Return the overrides of the command line by key or group, in a task."""
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return by_key(typed)


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Map the key or group of each override to the override."""
    return {override.partition("=")[0]: override for override in overrides}


def swept_dir() -> Path | None:
    """Return the output folder of this run of a sweep; None outside of a sweep."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    folder = Path(HydraConfig.get().runtime.output_dir)
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
