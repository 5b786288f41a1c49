#!/usr/bin/env bash
# Makes the source distribution in dist/, builds the CPU kernels from it alone, and runs its tests of
# the operators.
#
#   scripts/sdist.sh [PYTEST ARGUMENTS]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" tools "$@"

unset PYTHONPATH # would find the project's sources
export USE_CUDA=0
make_work_folder
rm -f dist/lenet_ops-*.tar.gz
step "Making the source distribution" python setup.py -q sdist --dist-dir dist
tar -xzf dist/lenet_ops-*.tar.gz -C "$work" --strip-components=1
cd "$work"
step "Building the operators from it" python setup.py -v build_ext --inplace
python -m pytest --timeout=300 --numprocesses=auto --maxprocesses=4 --dist=worksteal \
  tests/ops tests/test_build.py "$@"
