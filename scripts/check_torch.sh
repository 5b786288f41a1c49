#!/usr/bin/env bash
# Tests the operators with other PyTorch versions, and prints a table with a row for each version:
# with a wheel built from the source distribution by that version, and with a wheel built by the
# PyTorch in .venv, the newest.
#
#   scripts/check_torch.sh [--quick] VERSION...     2.10.0 2.13.0
#
# --quick: only the wheel built by .venv, and the tests of loading, registration, calls, autograd and
# torch.compile.
set -euo pipefail
quick=no
if [ "${1-}" = --quick ]; then
  quick=yes
  shift
fi
if [ $# = 0 ]; then
  printf 'usage: scripts/check_torch.sh [--quick] VERSION...\n' >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" tools

make_work_folder

# Tests of what depends on PyTorch's version; kernels and their values do not.
names=(autograd calls compile library registration)
if [ "$quick" = no ]; then
  names+=(autocast convert decompositions export gradient_strides like_builtins matrix modules sharding \
    transforms)
fi
version_tests=("${names[@]/%/.py}")
version_tests=("${version_tests[@]/#/tests/ops/test_}")

# Runs these tests outside the source tree, where `import ops` finds the wheel.
run_tests() {
  (
    cd "$work/tests"
    "$1" -c 'import ops, torch; print(f"{ops.__file__} beside torch {torch.__version__}")'
    "$1" -m pytest -q --timeout=300 --numprocesses=auto --maxprocesses=4 --dist=worksteal \
      "${version_tests[@]}"
  )
}

# Installs the wheel in a folder into an environment and runs the tests.
try_wheel() {
  step "Installing $2" "$1" -m pip install --disable-pip-version-check --no-deps \
    --force-reinstall "$work/$2"/*.whl &&
    run_tests "$1"
}

add_row() { printf '| %s | %s | %s | %s |\n' "$@" >>"$work/table"; }

# Adds a row to the table; fails if a build or a test fails.
check_version() {
  local version=$1 python="$work/$1/bin/python" built=- own=- newest=failed
  make_environment "$work/$version" "torch==$version" \
    -r requirements/build.txt -r requirements/ops.txt "${test_tools[@]}" ||
    {
      add_row "$version" 'not installed' - -
      return 1
    }
  if [ "$quick" = no ]; then
    built=failed
    if build_wheel "$work/wheel-$version" "$python" "$(echo "$work"/*.tar.gz)"; then
      built=ok own=failed
      try_wheel "$python" "wheel-$version" && own=ok
    fi
  fi
  try_wheel "$python" newest && newest=ok
  rm -rf "${work:?}/$version"
  add_row "$version" "$built" "$own" "$newest"
  [[ "$built$own$newest" != *failed* ]]
}

# The operators' tests need neither browsers nor other runtimes.
mapfile -t test_tools < <(grep -E '^(pytest|hypothesis)' requirements/test.txt)
mkdir "$work/tests"
cp -r tests pyproject.toml "$work/tests"
step "Making the source distribution" env USE_CUDA=0 python setup.py -q sdist --dist-dir "$work"
build_wheel "$work/newest"
add_row torch 'builds from source' 'tests, its own wheel' 'tests, newest wheel'
add_row --- --- --- ---
status=0
for version in "$@"; do
  printf '\n== torch %s\n' "$version"
  check_version "$version" || status=1
done
printf '\n'
cat "$work/table"
exit "$status"
