"""Command line: Hydra composes the configuration, pydantic validates it.

This module does not import torch; commands import heavy modules when they run.
"""

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from multiprocessing import current_process
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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from app.config.arguments import find_keys, parse_arguments
from app.config.errors import RunError, UserError, check_writable, one_line, to_run_error
from app.config.options import hydra_parser
from app.config.process import GRACE, exit_codes, handle_signals, interrupt_after_grace
from app.config.schema import SettingError, from_mapping, unknown_key

T = TypeVar("T")


def hydra_main(
    config_name: str, schema: type[T]
) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Decorate a command that takes its configuration as an instance of `schema`.

    Hydra composes the configuration from conf/<config_name>.yaml and the overrides. `exit_codes`
    handles errors; `HYDRA_FULL_ERROR=1` adds the traceback.
    """

    def decorate(task: Callable[[T], Any]) -> Callable[[], None]:
        full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
        failed: list[Path] = []  # folders of failed runs of a sweep in this process

        def job(cfg: DictConfig) -> Any:
            folder = swept_dir()
            if folder is None:
                # A single run ends here, so that main does not take the task's ValueError for
                # Hydra's.
                with exit_codes(full_error):
                    return task(build_config(schema, cfg, typed_overrides()))
            try:
                return task(build_config(schema, cfg, typed_overrides()))
            except Exception as error:  # Hydra runs the remaining jobs, then raises
                reason = one_line(to_run_error(error))
                print(f"failed: {folder}: {reason}", file=sys.stderr, flush=True)
                failed.append(folder)
                vars(error)["of_run"] = True  # survives pickling in a launcher's worker
                raise
            except KeyboardInterrupt:
                # a launcher's worker: wait until it is killed instead of starting the next run
                if current_process().name != "MainProcess":
                    time.sleep(2 * GRACE)
                raise

        @functools.wraps(task)
        def main() -> None:
            if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
                # by default OpenMP threads spin for milliseconds, which stalls a busy machine
                os.environ["GOMP_SPINCOUNT"] = "20000"
            with exit_codes(full_error):
                parser = hydra_parser(config_name)
                options = parse_arguments(parser, config_name, schema, sys.argv[1:])
                typed = [item for item in sys.argv[1:] if item.startswith(("hydra", "-c", "--c"))]
                hydra.version.setbase("1.3")
                os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, not print and exit
                try:
                    if options.multirun and not (options.help or options.hydra_help):
                        check_sweep(config_name, schema, options)
                        if any(item.startswith("hydra/launcher=") for item in options.overrides):
                            handle_signals(interrupt_after_grace)
                            # killed workers leave semaphores to the tracker, which frees them
                            os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
                    _run_hydra(options, parser, job, "pkg://conf", config_name)
                except Exception as error:
                    message = "" if "of_run" in vars(error) else hydra_message(error, typed)
                    if not message:
                        raise
                    run_failed = failed or isinstance(error, BrokenExecutor)
                    raise (RunError if run_failed else UserError)(message) from error
                finally:
                    os.environ["HYDRA_FULL_ERROR"] = "1" if full_error else "0"

        return main

    return decorate


def check_sweep(config_name: str, schema: type[T], options: argparse.Namespace) -> None:
    """Raise a UserError if a run of the sweep has a wrong setting or `outputs` cannot be written.

    Check the runs of Hydra's basic sweeper only; other sweepers choose settings while they run.
    """
    other_config = options.config_dir or options.config_name
    if other_config or any(item.startswith("hydra/sweeper=") for item in options.overrides):
        return
    outputs = set()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(options.overrides), None)
        for job in jobs:
            cfg: Any = build_config(schema, hydra.compose(config_name, job), by_key(job))
            outputs.add(cfg.outputs)
    for folder in map(Path, outputs):
        check_writable(folder, f"outputs={folder}")


def build_config(schema: type[T], cfg: DictConfig, typed: dict[str, str]) -> T:
    """Build `schema` from Hydra's configuration; raise a UserError for a wrong key or value.

    `typed` maps keys to overrides of the command line.
    """
    for key, override in typed.items():
        if key in ("data.name", "model.name", "optim.name"):  # the group's other values would stay
            raise UserError(f"{override}: use {override.replace('.name', '', 1)}")
    try:
        return from_mapping(schema, OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:  # a wrong interpolation
        raise UserError(hydra_message(error)) from error
    except SettingError as error:
        key, keys = whole_list(error.key), {whole_list(key) for key in typed}
        if key not in keys and "recipe" in typed:
            raise UserError(f"{typed['recipe']}: sets {error}") from error
        raise


def whole_list(key: str) -> str:
    """Return the key of the list for an item of it: model.channels for model.channels.1.0."""
    return re.sub(r"(\.\d+)+$", "", key)


def hydra_message(error: Exception, typed: Sequence[str] = ()) -> str:
    """Return Hydra's message in one line, with the key and the allowed values if known.

    `typed` are arguments that configure Hydra: they cause its other exceptions. Return "" for
    errors that are not Hydra's.
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
    """Return the overrides of the command line by key or group; {} outside of a Hydra job."""
    if not HydraConfig.initialized():
        return {}
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return by_key(typed)


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Map the key or group of each override to the override."""
    return {override.partition("=")[0]: override for override in overrides}


def swept_dir() -> Path | None:
    """Return the output folder of this run of a sweep; None outside of a sweep."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    folder = Path(HydraConfig.get().runtime.output_dir)
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
