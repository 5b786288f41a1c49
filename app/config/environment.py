"""The environment variables of torchrun."""

import os
import re
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from app.config.errors import UserError
from app.config.schema import from_mapping


def _digits(value: str) -> str:
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError("Input should be a whole number")
    return value


Digits = BeforeValidator(_digits)


@dataclass(config=ConfigDict(extra="ignore"))
class Torchrun:
    """The environment variables that torchrun sets for each of its processes."""

    size: Annotated[int, Digits, Field(alias="WORLD_SIZE", ge=1)] = 1
    rank: Annotated[int, Digits, Field(alias="RANK")] = 0
    local_rank: Annotated[int | None, Digits, Field(alias="LOCAL_RANK")] = None
    restarts: Annotated[int, Digits, Field(alias="TORCHELASTIC_RESTART_COUNT")] = 0
    run_id: Annotated[str, Field(alias="TORCHELASTIC_RUN_ID")] = ""
    port: Annotated[int, Digits, Field(alias="MASTER_PORT", lt=2**16)] = 0


def read_torchrun() -> Torchrun:
    """Read the environment variables of torchrun; raise a UserError if they are invalid."""
    found: Torchrun = from_mapping(Torchrun, dict(os.environ))
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if found.size > 1 and name not in os.environ:
            raise UserError(f"WORLD_SIZE={found.size}: needs {name}, too (torchrun sets them)")
    if found.rank >= found.size:
        reason = f"should be less than WORLD_SIZE={found.size} (torchrun sets them)"
        raise UserError(f"RANK={found.rank}: {reason}")
    return found
