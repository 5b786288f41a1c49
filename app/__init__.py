"""Application: train networks of the operators in `ops`, predict with them, export them."""

import sys
from importlib.util import find_spec

from app.config.errors import handle_signals

if sys.argv[0] == "-m":  # python -m app.train: no traceback on Ctrl-C during imports
    handle_signals()
for package in ("pydantic", "hydra"):
    if find_spec(package) is None:
        missing = f"{package} is missing: pip install 'lenet-ops[app]'"
        raise ModuleNotFoundError(missing, name=package)
