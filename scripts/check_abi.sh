#!/usr/bin/env bash
# Builds one wheel and runs the operators' tests on it beside another PyTorch than it was built with.
#
#   scripts/check_abi.sh [--prepare] [torch==2.13.0]
#
# --prepare: only installs that PyTorch, into .venv-abi, beside whatever else is being done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=test
if [ "${1:-}" = --prepare ]; then
  what=nothing
  shift
fi
torch=${1:-torch==2.13.0}
source scripts/setup.sh "$what"

other="$PWD/.venv-abi/bin/python"
is_suitable "$other" || step "Making .venv-abi" "$(find_python)" -m venv .venv-abi
step "Installing $torch" \
  "$other" -m pip install --disable-pip-version-check "$torch" numpy pytest pytest-xdist hypothesis
if [ "$what" = nothing ]; then
  exit
fi

# Away from the source tree, so that `import ops` finds the wheel.
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cp -r tests pyproject.toml "$away"

step "Building the wheel" \
  python -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps -w "$away" .

step "Installing the wheel" \
  "$other" -m pip install --disable-pip-version-check --no-deps --force-reinstall "$away"/*.whl

cd "$away"
"$other" -c 'import ops, torch; print(f"{ops.__file__} beside torch {torch.__version__}")'
# Not those that go through the kernels' loops, which are the same beside any PyTorch: of the values
# those in float32 are enough.
"$other" -m pytest --numprocesses=auto --maxprocesses=4 tests/ops \
  --ignore=tests/ops/test_depthwise_conv2d.py --ignore=tests/ops/test_instruction_sets.py \
  -k "not (test_values and (float16 or bfloat16 or float64))"
