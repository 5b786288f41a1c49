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
    port: Annotated[int, Field(alias="MASTER_PORT", ge=0, lt=2**16)] = 0


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
