"""What the commands share: configuration in, one clear line out when it is wrong.

Nothing here imports torch; the entry points import the heavy modules when they run.
"""

import functools
import gc
import logging
import os
import re
import signal
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from app.config import ModelConfig, TrainConfig, allowed, choices_of, from_mapping
from app.errors import RunError, UserError, end_unread, open_closed_outputs, refuse_usage
from app.explain import explain
from app.runs import key_of, typed_keys, typed_overrides
from app.sweep import Sweep

__all__ = ["RunError", "UserError", "hydra_main"]

T = TypeVar("T")

# Keys whose values are taken as typed, and what of these Hydra's grammar does not.
PATHS = ("checkpoint", "data.root", "file", "input", "outputs", "resume")
UNUSUAL = re.compile(r"[^\w\s/.$%*@?|:+-]", re.ASCII)
PLACES = ("hydra.run.dir", "hydra.output_subdir", "hydra.job.chdir")  # that Hydra would use
FOREIGN = ("--config-name", "-cn", "--config-path", "-cp")  # options that choose another conf/
PATIENCE = 10  # seconds
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def hydra_main(
    config_name: str, schema: type[T]
) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Decorate an entry point, so that it is called with a checked `schema` object.

    Composes conf/<config_name>.yaml with the command line. Exit codes: 0 done, 2 wrong usage,
    1 failure, 130 interrupted, 141 nobody reads the output any more. Wrong usage is one line on
    stderr; `HYDRA_FULL_ERROR=1` adds the traceback. SIGTERM is Ctrl-C.

    Args:
        config_name: The primary configuration; its defaults begin with `<config_name>_schema`.
        schema: The dataclass that it must satisfy.
    """

    def decorate(task: Callable[[T], Any]) -> Callable[[], None]:
        full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
        sweep = Sweep()

        @functools.wraps(task)
        def job(cfg: DictConfig) -> Any:
            gc.enable()
            try:
                _refuse_idle_overrides(schema)
                built = from_mapping(schema, OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
                if isinstance(built, TrainConfig):
                    _refuse_others_settings(built)
                result = task(built)
                sweep.ended.append(0)
                return result
            except BrokenPipeError:
                end_unread()
            except Exception as error:
                explained = explain(error, schema)
                if HydraConfig.get().mode == RunMode.RUN:
                    _fail(explained, full_error)
                _show_traceback(explained, full_error)
                sweep.fail(cfg, explained)
                return None  # of a failed trial, for Optuna; the others go on

        @functools.wraps(task)
        def main() -> None:
            open_closed_outputs()
            logging.raiseExceptions = False  # of a log that nobody reads any more
            gc.disable()  # or a third of the time goes to it, while Hydra copies its settings
            # Hydra copies its sources for every group, but the store is one for all.
            ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
            ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)
            OmegaConf.register_new_resolver("sweep_folder", sweep.folder, replace=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            # torch's threads spin while they wait; on a busy machine, endlessly for one another
            os.environ.setdefault("GOMP_SPINCOUNT", "20000")
            if not {"-m", "--multirun"} & set(sys.argv):  # a sweep needs Hydra's grammar
                sys.argv[1:] = map(quote_path, sys.argv[1:])
            try:
                _refuse_arguments(sys.argv[1:], schema)
                with _hydra_raises(), sweep:
                    hydra.main("pkg://conf", config_name, version_base="1.3")(job)()
                sys.stdout.flush()
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                sys.exit(INTERRUPTED)
            except BrokenPipeError:
                end_unread()
            except Exception as error:
                _fail(explain(error, schema), full_error)
            finally:
                gc.enable()

        return main

    return decorate


def _refuse_arguments(arguments: list[str], schema: type) -> None:
    """Raise a UserError for what Hydra knows and the commands do not, before it makes folders."""
    for argument in arguments:
        key = key_of(argument)
        if "=" in argument and not key:
            raise UserError(f"{argument}: not of the form key=value")
        if key in FOREIGN:
            raise UserError(f"{argument}: a command has its own configuration, add to it by keys")
        if argument.startswith("~"):
            raise UserError(f"{argument}: a key cannot be taken out, leave it out for its default")
        if key in PLACES:
            raise UserError(f"{argument}: a run makes its own folder, choose outputs=...")
        if schema is not TrainConfig and key in ("-m", "--multirun", "hydra.mode"):
            raise UserError(f"{argument}: only app.train takes several values")


def _refuse_idle_overrides(schema: type) -> None:
    """Raise a UserError for what Hydra takes and nothing would come of."""
    for override in typed_overrides():
        key, _, value = override.partition("=")
        if value.replace(" ", "") == "{}":
            raise UserError(f"{override}: {allowed(schema, key.lstrip('+'))}")
    verbose = HydraConfig.get().verbose
    if not isinstance(verbose, bool):
        raise UserError(f"hydra.verbose={verbose}: choose from true, false")


def _refuse_others_settings(cfg: TrainConfig) -> None:
    """Raise a UserError for what only another network than the one to train has a choice of."""
    if cfg.model.name == "lenet":
        return
    typed = typed_keys()
    for key in choices_of("lenet"):
        value, which = getattr(cfg.model, key), f"which model={cfg.model.name} does not have"
        if f"model.{key}" in typed:
            raise UserError(f"model.{key}={value}: a setting of LeNet, {which}, leave it out")
        if value != getattr(ModelConfig(), key):
            raise UserError(f"recipe={cfg.recipe}: sets model.{key}, {which}, choose recipe=fast")


def quote_path(argument: str) -> str:
    """Quote a path with characters that Hydra's grammar stumbles over, such as `IMG (1).png`."""
    key, _, path = argument.partition("=")
    if key not in PATHS or not path.strip() or path[0] in "'\"" or not UNUSUAL.search(path):
        return argument
    return f"{key}='" + path.replace("'", "\\'") + "'"


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let Hydra raise its exceptions, where it would print several lines and exit with 1 or 2."""
    before, error = os.environ.get("HYDRA_FULL_ERROR"), ArgumentParser.error
    os.environ["HYDRA_FULL_ERROR"] = "1"
    ArgumentParser.error = refuse_usage  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ArgumentParser.error = error  # type: ignore[method-assign]
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _fail(error: Exception, full_error: bool) -> NoReturn:
    if isinstance(error, UserError) and int(os.environ.get("LOCAL_RANK", 0)) > 0:
        # all of torchrun's processes find it: the first says so, and torchrun ends the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)
    _show_traceback(error, full_error)
    if isinstance(error, UserError | RunError):
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(1)


def _show_traceback(error: Exception, full_error: bool) -> None:
    """Show the traceback of a mistake in the program, and of others on request."""
    if full_error or not isinstance(error, UserError | RunError):
        traceback.print_exception(error)
