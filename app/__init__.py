"""Application: train networks of the operators in `ops`, predict with them, export them."""

import sys
from importlib.util import find_spec

from app.config.errors import UserError, missing_package
from app.config.process import handle_signals, open_streams

is_command = sys.argv[0] == "-m"  # python -m app.train: no tracebacks during imports
if is_command:
    open_streams()
    handle_signals()
for package in ("pydantic", "hydra"):
    if find_spec(package) is None:
        missing = missing_package(package)
        if is_command:
            print(f"error: {missing}", file=sys.stderr)
            sys.exit(UserError.exit_code)
        raise ModuleNotFoundError(missing, name=package)
