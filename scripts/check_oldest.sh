#!/usr/bin/env bash
# Runs the tests with the oldest versions of all dependencies (requirements/oldest.txt), in a
# separate environment. The operators' wheel is built with the PyTorch in .venv.
#
#   scripts/check_oldest.sh [PYTEST ARGUMENTS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" tools "$@"

make_work_folder

build_wheel "$work"
make_environment "$work/env" --constraint requirements/oldest.txt \
  "$(echo "$work"/lenet_ops-*.whl)[test]"

# Outside the source tree `import ops` and `import app` find the wheel. The ignored tests compile
# the sources.
mkdir "$work/away"
cp -r tests conf docs scripts README.md pyproject.toml "$work/away"
if [ -d data ]; then
  ln -s "$PWD/data" "$work/away"
fi
cd "$work/away"
"$work/env/bin/python" -m pytest --timeout=300 --numprocesses=auto --maxprocesses=4 --dist=worksteal \
  --ignore=tests/ops/test_bfloat16_store.py --ignore=tests/ops/test_new_operator.py \
  tests/ops tests/app "$@"
