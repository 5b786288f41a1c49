"""Train, predict with and export a LeNet made of the operators in `ops`."""

from importlib.util import find_spec

for package in ("pydantic", "hydra"):
    if find_spec(package) is None:
        missing = f"{package} is missing: pip install 'lenet-ops[app]'"
        raise ModuleNotFoundError(missing, name=package)
