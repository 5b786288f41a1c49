"""The environment variables of torchrun."""

import os
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from app.config.errors import UserError
from app.config.schema import from_mapping


@dataclass(config=ConfigDict(extra="ignore"))
class Torchrun:
    """The environment variables that torchrun sets for each of its processes."""

    size: Annotated[int, Field(alias="WORLD_SIZE", ge=1)] = 1
    rank: Annotated[int, Field(alias="RANK", ge=0)] = 0
    local_rank: Annotated[int | None, Field(alias="LOCAL_RANK", ge=0)] = None
    restarts: Annotated[int, Field(alias="TORCHELASTIC_RESTART_COUNT", ge=0)] = 0
    run_id: Annotated[str, Field(alias="TORCHELASTIC_RUN_ID")] = ""
    port: Annotated[int, Field(alias="MASTER_PORT", ge=1, lt=2**16)] = 0


def read_torchrun() -> Torchrun:
    """Read the environment variables of torchrun; raise a UserError if they are invalid."""
    found: Torchrun = from_mapping(Torchrun, dict(os.environ))
    needed = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing and (found.size > 1 or (found.rank and "WORLD_SIZE" in missing)):
        given = f"WORLD_SIZE={found.size}" if found.size > 1 else f"RANK={found.rank}"
        raise UserError(f"{given}: needs {', '.join(missing)}, too (torchrun sets them)")
    if found.rank >= found.size:
        reason = f"should be less than WORLD_SIZE={found.size} (torchrun sets them)"
        raise UserError(f"RANK={found.rank}: {reason}")
    return found
