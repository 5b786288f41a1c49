"""Hydra configuration; a package, for `pkg://conf` to work in a wheel and from any folder."""
