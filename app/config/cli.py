"""What the commands share: configuration in, one clear line out when it is wrong.

Nothing here imports torch; the entry points import the heavy modules when they run.
"""

import dataclasses
import errno
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
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, Protocol, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from app.config.errors import RunError, UserError, end_unread, open_closed_outputs, refuse_usage
from app.config.overrides import key_of, typed_keys, typed_overrides
from app.config.schema import (
    ModelConfig,
    TrainConfig,
    allowed,
    choices_of,
    from_mapping,
    shown,
    unknown_key,
)

__all__ = ["RunError", "UserError", "hydra_main"]
T = TypeVar("T")
# Keys whose values are taken as typed, and what of these Hydra's grammar does not.
PATHS = ("checkpoint", "data.root", "file", "input", "outputs", "resume")
UNUSUAL = re.compile(r"[^\w\s/.$%*@?|:+-]", re.ASCII)
PLACES = ("hydra.run.dir", "hydra.output_subdir", "hydra.job.chdir")  # that Hydra would use
FOREIGN = ("--config-name", "-cn", "--config-path", "-cp")  # options that choose another conf/
PATIENCE = 10  # seconds
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
NO_GROUP = re.compile(r"Could not override '([^'@]*).*'\. No match in the defaults list")
SEVERAL = re.compile(r"Ambiguous value for argument '(.*?)'\n", re.DOTALL)
SWEPT = re.compile(r"Sweep parameters '(.*?)' requires --multirun")
KEY = re.compile(r"[\w./@:+~-]+")
NAMELESS = re.compile(r"\+*(model|data|optim|recipe|hydra/\w+)=(null|true|false|[\d.]*)")


class Sweep(Protocol):
    """Runs of a command with several values for a key, as `app.runs.sweep` keeps them."""

    ended: list[int]

    def folder(self, outputs: str) -> str:
        """Return the folder to make in `outputs` for all runs."""

    def fail(self, cfg: DictConfig, error: Exception) -> None:
        """Report that the current run has failed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


def hydra_main(
    config_name: str, schema: type[T], sweep: Sweep | None = None
) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Decorate an entry point, so that it is called with a checked `schema` object.

    Composes conf/<config_name>.yaml with the command line. Exit codes: 0 done, 2 wrong usage,
    1 failure, 130 interrupted, 141 nobody reads the output any more. Wrong usage is one line on
    stderr; `HYDRA_FULL_ERROR=1` adds the traceback. SIGTERM is Ctrl-C.

    Args:
        config_name: The primary configuration; its defaults begin with `<config_name>_schema`.
        schema: The dataclass that it must satisfy.
        sweep: Takes several values for a key; None: the command takes one.
    """

    def decorate(task: Callable[[T], Any]) -> Callable[[], None]:
        full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"

        @functools.wraps(task)
        def job(cfg: DictConfig) -> Any:
            gc.enable()
            try:
                _refuse_idle_overrides(schema)
                built = from_mapping(schema, OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
                if isinstance(built, TrainConfig):
                    _refuse_others_settings(built)
                result = task(built)
                if sweep:
                    sweep.ended.append(0)
                return result
            except BrokenPipeError:
                end_unread()
            except Exception as error:
                explained = explain(error, schema)
                if sweep is None or HydraConfig.get().mode == RunMode.RUN:
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
            if sweep:
                OmegaConf.register_new_resolver("sweep_folder", sweep.folder, replace=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            # torch's threads spin while they wait; on a busy machine, endlessly for one another
            os.environ.setdefault("GOMP_SPINCOUNT", "20000")
            if not {"-m", "--multirun"} & set(sys.argv):  # a sweep needs Hydra's grammar
                sys.argv[1:] = map(quote_path, sys.argv[1:])
            try:
                _refuse_arguments(sys.argv[1:], schema)
                with _hydra_raises(), sweep or nullcontext():
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


def explain(error: Exception, schema: type) -> Exception:
    """The UserError or RunError that an exception stands for; another comes back as it is.

    Args:
        error: Whatever composing a configuration, or a command with it, has raised.
        schema: The dataclass that the configuration must satisfy.
    """
    if isinstance(error, UserError | RunError):
        return error
    if isinstance(error, ImportError) and error.name == "ops":  # not built
        return _chain(RunError(str(error)), error)
    if isinstance(error, OSError) and error.strerror:
        full = error.errno == errno.ENOSPC  # of a file it is a WriteError, which names it
        where = error.filename or ("standard output" if full else None)
        return _chain(RunError(f"{where}: {error.strerror}" if where else error.strerror), error)
    line = _line(error, schema)
    return _chain(UserError(line), error) if line else error


def _chain(explained: Exception, error: Exception) -> Exception:
    explained.__cause__ = error
    return explained


def _line(error: Exception, schema: type) -> str | None:
    """What is wrong with the usage, in a line; None: it is not the usage that is wrong."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _no_such_option(error)
    if several := SEVERAL.match(str(error)) or SWEPT.match(str(error)):
        allows = "several values need -m" if schema is TrainConfig else "takes one value"
        return f"{several[1]}: {allows}"
    if no_group := NO_GROUP.match(str(error)):
        typed = (argument.partition("=") for argument in sys.argv[1:])
        value = next((value for key, _, value in typed if key.partition("@")[0] == no_group[1]), "")
        return str(unknown_key(no_group[1], value, schema))
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, InterpolationResolutionError):
        key = f"{cause.full_key}: " if cause.full_key else ""
        return key + str(cause).splitlines()[0]
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _wrong_setting(error, cause, schema)
    if isinstance(error, HydraException | OmegaConfBaseException | MissingConfigException):
        return _one_line(error)
    return _of_value_error(str(error)) if isinstance(error, ValueError) else None


def _unreadable(error: OverrideParseException) -> str:
    """What Hydra's grammar has no reading of; its own words are of that grammar."""
    key, equals, _ = error.override.partition("=")
    if not equals or not KEY.fullmatch(key):
        return f"{error.override}: not of the form key=value"
    return f"{error.override}: the value cannot be read, complete or quote it: \"{key}='...'\""


def _of_value_error(text: str) -> str | None:
    """What Hydra has no exception of its own for."""
    if text.startswith("Config group override"):  # it does not say which
        typed = (argument for argument in sys.argv[1:] if NAMELESS.fullmatch(argument))
        return f"{' '.join(typed)}: not the name of an option, leave it out for the default"
    if text.startswith(("Only one of --run", "The --resolve flag")):
        return text
    return None


def _no_such_option(error: MissingConfigException) -> str:
    assert error.missing_cfg_file and error.options
    group, _, option = error.missing_cfg_file.rpartition("/")
    line = f"{group}={option}: choose from {', '.join(sorted(error.options))}"
    if group in ("hydra/sweeper", "hydra/launcher"):
        line += f", or pip install hydra-{option}-{group.rpartition('/')[2]}"
    return line


def _wrong_setting(error: Exception, cause: OmegaConfBaseException, schema: type) -> str:
    override = _override(error, cause)
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{override}: {_allowed(schema, cause)}"
    key, _, value = override.lstrip("+~").partition("=")
    parent = cause.object_type
    if isinstance(parent, type) and dataclasses.is_dataclass(parent):
        return str(unknown_key(key, value, parent))
    return f"{key}={value}: unknown key"


def _allowed(schema: type, cause: OmegaConfBaseException) -> str:
    try:
        return allowed(schema, str(cause.full_key))
    except KeyError:  # one of Hydra's own keys
        return _one_line(cause)


def _override(error: Exception, cause: OmegaConfBaseException) -> str:
    """The `key=value` that was typed; Hydra has it only in its message."""
    text = str(error)
    for opening, closing in (
        ("Error merging override ", "\n"),
        ("To append to your config use +", "\n"),
    ):
        _, found, rest = text.partition(opening)
        if found:
            return rest.partition(closing)[0]
    return f"{cause.full_key}={shown(cause.value)}"


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
