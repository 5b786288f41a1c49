"""Run folders: outputs/<date>/<time>-<unique>, one for each run, never shared."""

import secrets
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from app.config import TrainConfig
from app.errors import UserError


def run_name() -> str:
    """A name for a new run: `<date>/<time>-<eight random hexadecimal digits>`."""
    return f"{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(4)}"


def create_run_folder(cfg: TrainConfig) -> Path:
    """Make the folder of this run and write its configuration to `.hydra/` in it.

    The folder is made by the run, not by Hydra, and only when everything that can be wrong with the
    command has been checked: wrong usage leaves nothing behind. In a sweep it is Hydra's own.

    Raises:
        UserError: The folder cannot be written.
    """
    folder, sweeping, overrides = Path(cfg.outputs) / run_name(), False, []
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        overrides = list(hydra.overrides.task)
        if hydra.mode == RunMode.MULTIRUN:
            folder, sweeping = Path(hydra.runtime.output_dir), True
    try:
        folder.mkdir(parents=True, exist_ok=sweeping)
        (folder / ".hydra").mkdir()
        OmegaConf.save(OmegaConf.structured(cfg), folder / ".hydra" / "config.yaml")
        OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    except OSError as error:
        raise UserError(f"outputs={cfg.outputs}: cannot be written: {error.strerror}") from error
    return folder
