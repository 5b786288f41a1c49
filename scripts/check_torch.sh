#!/usr/bin/env bash
# Tests the operators beside other PyTorch versions, and prints a table with a row for each version and
# wheel: one built by that version from the source distribution, and one built by the PyTorch in .venv.
#
#   scripts/check_torch.sh [--quick | --wheel FILE] VERSION...     2.10.0 2.13.0
#
# --quick: only the wheel built by .venv, and the tests of registration, calls, autograd and
# torch.compile that take a second. --wheel: only this wheel.
set -euo pipefail
usage() {
  printf 'usage: scripts/check_torch.sh [--quick | --wheel FILE] VERSION...\n' >&2
  exit 2
}
quick=no builds=yes wheel=
case ${1-} in
  --quick) quick=yes builds=no && shift ;;
  --wheel)
    builds=no wheel=$(realpath -e "${2-}") || usage
    shift 2
    ;;
esac
[ $# -gt 0 ] || usage
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" tools

unset PYTHONPATH # would find the sources
make_work_folder

# Tests of what depends on PyTorch's version; kernels and their values do not.
names=(autograd calls compile registration)
slow='test_opcheck or test_fake or test_gradients_against or test_compiled_autograd or test_compile_dynamic'
selected=()
if [ "$quick" = yes ]; then
  selected=(-k "not ($slow)")
else
  names+=(autocast convert decompositions export gradient_strides library like_builtins matrix modules \
    sharding transforms)
fi
version_tests=("${names[@]/%/.py}")
version_tests=("${version_tests[@]/#/tests/ops/test_}")

# Prints whether autograd is in C++, and the time of a call.
describe() {
  "$1" - <<'END'
import sys
import timeit

import ops
import torch
from ops.core.library import EAGER

eager = any(EAGER in path for path in torch.ops.loaded_libraries)
torch.set_num_threads(1)
x = torch.randn(16)
ops.gelu(x)
seconds = min(timeit.repeat(lambda: ops.gelu(x), number=2000, repeat=20)) / 2000
print(f"{'yes' if eager else 'no'} | {1e6 * seconds:.2f} µs")
print(f"{ops.__file__} beside torch {torch.__version__}", file=sys.stderr)
END
}

# Installs a wheel into an environment, runs the tests outside the source tree, where `import ops`
# finds the wheel, and adds a row to the table.
try_wheel() {
  local version=$1 kind=$2 wheel=$3 python="$work/$1/bin/python"
  local eager passed=failed
  step "Installing the wheel" "$python" -m pip install --disable-pip-version-check --no-deps \
    --force-reinstall "$wheel" &&
    eager=$(cd "$work/tests" && describe "$python") &&
    (cd "$work/tests" && "$python" -m pytest -q --timeout=300 --numprocesses=auto \
      --maxprocesses=4 --dist=worksteal "${selected[@]}" "${version_tests[@]}" | tee "$work/results") &&
    passed=$(tail -n 1 "$work/results" | sed -E 's/ in .*//')
  add_row "$version" "$kind" "${eager:-- | -}" "$passed"
  [ "$passed" != failed ]
}

add_row() { printf '| %s | %s | %s | %s |\n' "$@" >>"$work/table"; }

# Tries each wheel beside a version; fails if a build or a test fails.
check_version() {
  local version=$1 status=0
  make_environment "$work/$version" "torch==$version" \
    -r requirements/build.txt -r requirements/ops.txt "${test_tools[@]}" ||
    {
      add_row "$version" - '- | -' 'not installed'
      return 1
    }
  if [ "$builds" = yes ]; then
    if build_wheel "$work/own-$version" "$work/$version/bin/python" "$(echo "$work"/*.tar.gz)"; then
      try_wheel "$version" own "$work/own-$version"/*.whl || status=1
    else
      add_row "$version" own '- | -' 'not built'
      status=1
    fi
  fi
  try_wheel "$version" "$kind" "$wheel" || status=1
  rm -rf "${work:?}/$version"
  return "$status"
}

# The operators' tests need neither browsers nor other runtimes.
mapfile -t test_tools < <(grep -E '^(pytest|hypothesis)' requirements/test.txt)
mkdir "$work/tests"
cp -r tests pyproject.toml "$work/tests"
if [ "$builds" = yes ]; then
  step "Making the source distribution" env USE_CUDA=0 python setup.py -q sdist --dist-dir "$work"
fi
kind=given
if [ -z "$wheel" ]; then
  build_wheel "$work/newest"
  kind=.venv wheel=$(echo "$work"/newest/*.whl)
fi
add_row torch wheel 'eager library | gelu, 16 numbers' tests
add_row --- --- '--- | ---' ---
status=0
for version in "$@"; do
  printf '\n== torch %s\n' "$version"
  check_version "$version" || status=1
done
printf '\n'
cat "$work/table"
exit "$status"
