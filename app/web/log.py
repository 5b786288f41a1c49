"""Log expected failures of connections as one line each, without a traceback."""

import copy
import errno
import logging
import time
from typing import Any

from starlette.requests import ClientDisconnect
from uvicorn.config import LOGGING_CONFIG

PAUSE = 10.0  # seconds between equal lines


class ExpectedFailures(logging.Filter):
    """Shorten the records of expected failures; drop a line that was logged within `PAUSE`."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}  # time of each line, which are few

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log `record`; replace its message and traceback by a line."""
        line = describe(record.exc_info[1]) if record.exc_info else None
        if line is None:
            return True
        record.msg, record.args, record.exc_info = line, (), None
        now = time.monotonic()
        if now < self._logged.get(line, -PAUSE) + PAUSE:
            return False
        self._logged[line] = now
        return True


def describe(error: BaseException | None) -> str | None:
    """Return a line about an expected failure, None for any other."""
    if isinstance(error, ClientDisconnect):
        return "a client aborted its upload"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files: new connections wait until others are closed"
    return None


def log_config() -> dict[str, Any]:
    """Return uvicorn's logging configuration with this filter, also for asyncio's logger."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"expected": {"()": ExpectedFailures}}
    config["handlers"]["default"]["filters"] = ["expected"]
    config["loggers"]["asyncio"] = {"handlers": ["default"], "level": "ERROR", "propagate": False}
    return config
