"""Train, predict with and export a LeNet made of the operators in `ops`."""

import sys
from importlib.util import find_spec

from app.config.errors import handle_signals

if sys.argv[0] == "-m":  # python -m app.train: Ctrl-C while it imports shows no traceback
    handle_signals()
for package in ("pydantic", "hydra"):
    if find_spec(package) is None:
        missing = f"{package} is missing: pip install 'lenet-ops[app]'"
        raise ModuleNotFoundError(missing, name=package)
