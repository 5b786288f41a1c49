#!/usr/bin/env bash
# Sets up, checks style and types, runs the tests. Arguments go to pytest: scripts/test.sh -k gelu -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test

ruff check
ruff format --check
mypy
lint-imports
list_sources -exec clang-format --dry-run -Werror {} +
shellcheck scripts/*.sh .ci/run
python -m pytest --timeout=300 --numprocesses=auto --maxprocesses=4 --dist=worksteal "$@"
