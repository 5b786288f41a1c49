"""Hydra configuration, a package so that it is found from a wheel and from any folder."""
