"""Configurations of networks that several tests use."""

from app.config.schema import SeparableConfig

TINY = SeparableConfig([[16], [24, 24], [40, 48]])  # model=tiny
