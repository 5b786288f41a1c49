"""Train, predict with and export a LeNet made of the operators in `ops`."""

from importlib.util import find_spec

if find_spec("pydantic") is None or find_spec("hydra") is None:
    missing = "the commands need more packages: pip install 'lenet-ops[app]'"
    raise ModuleNotFoundError(missing, name="hydra")
