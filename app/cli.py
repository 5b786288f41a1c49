"""What the commands share: configuration in, one clear line out when it is wrong.

Nothing here imports torch; the entry points import the heavy modules when they run.
"""

import copyreg
import dataclasses
import functools
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

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

from app.config import (
    ModelConfig,
    TrainConfig,
    allowed,
    choices_of,
    from_mapping,
    shown,
    unknown_key,
)
from app.errors import RunError, UserError
from app.runs import key_of, note_failure, run_name, typed_keys, typed_overrides

__all__ = ["RunError", "UserError", "hydra_main"]

T = TypeVar("T")
PATHS = (
    "checkpoint",
    "data.root",
    "file",
    "input",
    "outputs",
    "resume",
)  # keys whose values are taken as typed
UNUSUAL = re.compile(r"[^\w\s/.$%*@?|:+-]", re.ASCII)
PLACES = ("hydra.run.dir", "hydra.output_subdir", "hydra.job.chdir")  # that Hydra would use
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def hydra_main(
    config_name: str, schema: type[T]
) -> Callable[[Callable[[T], Any]], Callable[[], None]]:
    """Decorate an entry point, so that it is called with a checked `schema` object.

    Composes conf/<config_name>.yaml with the command line. Exit codes: 0 done, 2 wrong usage,
    1 failure, 130 interrupted. Wrong usage is one line on stderr; `HYDRA_FULL_ERROR=1` adds the
    traceback. SIGTERM is Ctrl-C.

    Args:
        config_name: The primary configuration; its defaults begin with `<config_name>_schema`.
        schema: The dataclass that it must satisfy.
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
                return task(built)
            except Exception as error:
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    note_failure(cfg, str(_explain(error, schema)))
                    raise  # Hydra goes on with the sweep
                _fail(_explain(error, schema), full_error)

        @functools.wraps(task)
        def main() -> None:
            gc.disable()  # or a third of the time goes to it, while Hydra copies its settings
            # Hydra copies its sources for every group, but the store is one for all.
            copyreg.pickle(ConfigStore, lambda _: (ConfigStore.instance, ()))
            ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)
            OmegaConf.register_new_resolver("run_name", run_name, use_cache=True, replace=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            # torch's threads spin while they wait; on a busy machine, endlessly for one another
            os.environ.setdefault("GOMP_SPINCOUNT", "20000")
            if not {"-m", "--multirun"} & set(sys.argv):  # a sweep needs Hydra's grammar
                sys.argv[1:] = map(quote_path, sys.argv[1:])
            try:
                _refuse_arguments(sys.argv[1:], schema)
                with _hydra_raises():
                    hydra.main("pkg://conf", config_name, version_base="1.3")(job)()
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                sys.exit(INTERRUPTED)
            except Exception as error:
                _fail(_explain(error, schema), full_error)
            finally:
                gc.enable()

        return main

    return decorate


def _refuse_arguments(arguments: list[str], schema: type) -> None:
    """Raise a UserError for what Hydra knows and the commands do not, before it makes folders."""
    for argument in arguments:
        key = key_of(argument)
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
    """Let Hydra raise its exceptions, where it would print several lines and exit with 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _fail(error: Exception, full_error: bool) -> NoReturn:
    known = isinstance(error, UserError | RunError)
    if full_error or not known:
        traceback.print_exception(error)
    if known:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code if isinstance(error, UserError | RunError) else 1)


def _explain(error: Exception, schema: type) -> Exception:
    """Turn what Hydra and OmegaConf raise into a UserError; any other error comes back as it is."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        line = f"{group}={option}: choose from {', '.join(sorted(error.options))}"
        if group in ("hydra/sweeper", "hydra/launcher"):
            line += f", or pip install hydra-{option}-{group.rpartition('/')[2]}"
    elif isinstance(error, OverrideParseException):
        line = f"{error.override}: not of the form key=value ({_one_line(error, skip='See ')})"
    elif isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return _chain(_unknown(error, cause, schema), error)
    elif isinstance(cause, InterpolationResolutionError):
        line = _one_line(cause)
    elif isinstance(cause, OmegaConfBaseException) and cause.full_key:
        line = f"{_override(error, cause)}: {_allowed(schema, cause)}"
    elif isinstance(error, HydraException | OmegaConfBaseException | MissingConfigException):
        line = _one_line(error)
    elif isinstance(error, ValueError) and str(error).startswith("Config group override"):
        groups = [arg for arg in sys.argv[1:] if arg.endswith("=null") and "." not in arg]
        line = f"{' '.join(groups)}: a group cannot be null, leave it out for its default"
    elif isinstance(error, OSError) and error.filename and error.strerror:
        return _chain(RunError(f"{error.filename}: {error.strerror}"), error)
    else:
        return error
    return _chain(UserError(line), error)


def _chain(explained: Exception, error: Exception) -> Exception:
    explained.__cause__ = error
    return explained


def _unknown(error: Exception, cause: OmegaConfBaseException, schema: type) -> UserError:
    key, _, value = _override(error, cause).lstrip("+~").partition("=")
    parent = cause.object_type
    if isinstance(parent, type) and dataclasses.is_dataclass(parent):
        return unknown_key(key, value, parent)
    return UserError(f"{key}={value}: unknown key")


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


def _one_line(error: Exception, skip: str = "\n") -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(skip))
