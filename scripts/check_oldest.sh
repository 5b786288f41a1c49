#!/usr/bin/env bash
# Runs the tests with the oldest versions that the lower bounds in requirements/ allow, in an
# environment of its own. The operators come from a wheel that the newest PyTorch, .venv's, builds.
#
#   scripts/check_oldest.sh [PYTEST ARGUMENTS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" tools "$@"

make_work_folder

build_wheel "$work"
make_environment "$work/env" --constraint requirements/oldest.txt \
  "$(echo "$work"/lenet_ops-*.whl)[test]"

# Away from the sources, so that `import ops` and `import app` find the wheel; without the tests that
# compile the sources.
mkdir "$work/away"
cp -r tests conf docs scripts README.md pyproject.toml "$work/away"
if [ -d data ]; then
  ln -s "$PWD/data" "$work/away"
fi
cd "$work/away"
"$work/env/bin/python" -m pytest --timeout=300 --numprocesses=auto --maxprocesses=4 \
  --ignore=tests/ops/test_bfloat16_store.py --ignore=tests/ops/test_new_operator.py \
  tests/ops tests/app "$@"
