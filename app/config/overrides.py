"""Typed command-line overrides."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf


def typed_overrides() -> list[str]:
    """The settings as they were typed; none outside of a command."""
    if not HydraConfig.initialized():
        return []
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return list(typed)


def typed_keys() -> dict[str, str]:
    """The overrides that were typed, by the key or group that each sets."""
    return {key_of(override): override for override in typed_overrides()}


def key_of(override: str) -> str:
    """The key or group that an override sets."""
    return override.lstrip("+").partition("=")[0]
