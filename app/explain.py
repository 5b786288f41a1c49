"""Wrong usage in one line: what Hydra and OmegaConf raise, as the UserError it stands for."""

import dataclasses
import errno
import re
import sys

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from app.config import TrainConfig, allowed, shown, unknown_key
from app.errors import RunError, UserError

NO_GROUP = re.compile(r"Could not override '([^'@]*).*'\. No match in the defaults list")
SEVERAL = re.compile(r"Ambiguous value for argument '(.*?)'\n", re.DOTALL)
SWEPT = re.compile(r"Sweep parameters '(.*?)' requires --multirun")
KEY = re.compile(r"[\w./@:+~-]+")
NAMELESS = re.compile(r"\+*(model|data|optim|recipe|hydra/\w+)=(null|true|false|[\d.]*)")


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
