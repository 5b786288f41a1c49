# Makes .venv, installs the requirements and builds the operators; does nothing where that is done.
#
#   source scripts/setup.sh           what the commands need
#   source scripts/setup.sh test      also what the tests need
#   source scripts/setup.sh nothing   only the functions below
#
# Leaves the project's folder current and .venv first on PATH. PYTHON chooses the interpreter for a
# new .venv. The variables that setup.py reads (USE_CUDA, TORCH_CUDA_ARCH_LIST, ...) are honoured.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$PWD/.venv"
requirements=requirements.txt
if [ "${1:-}" = test ]; then
  requirements=requirements-test.txt
fi

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Runs a command quietly: one line for it, all of its output where it fails.
step() {
  local title=$1 log status=0
  shift
  log=$(mktemp)
  printf '%s ... ' "$title"
  SECONDS=0
  "$@" >"$log" 2>&1 || status=$?
  if [ "$status" != 0 ]; then
    printf 'failed\n'
    cat "$log" >&2
    rm -f "$log"
    fail "this failed: $*"
  fi
  rm -f "$log"
  printf '%d s\n' "$SECONDS"
}

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# The python3 that the user has chosen, if it will do, else the newest there is.
find_python() {
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10 python)
  if [ -n "${PYTHON-}" ]; then
    candidates=("$PYTHON")
  fi
  local candidate
  for candidate in "${candidates[@]}"; do
    if is_suitable "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "no Python 3.10 or newer found (tried ${candidates[*]}): install one, or set PYTHON to its path"
}

# The stamp of a step says what it was done for.
is_done() { [ -f "$venv/$1.stamp" ] && [ "$(cat "$venv/$1.stamp")" = "$2" ]; }

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module: install it (Debian and Ubuntu: apt install python3-venv)"
  step "Making .venv with $("$python" --version)" "$python" -m venv "$venv"
  rm -f "$venv"/*.stamp
}

install_requirements() {
  local wanted
  wanted="$requirements $(cat requirements*.txt | cksum)"
  if ! is_done requirements "$wanted"; then
    step "Installing $requirements (the first time PyTorch is downloaded, which takes minutes)" \
      python -m pip install --disable-pip-version-check -r "$requirements"
    printf '%s\n' "$wanted" >"$venv/requirements.stamp"
  fi
}

# Lists the files that a build depends on.
sources() { find setup.py pyproject.toml ops -name '*.[ch]*' -o -name '*.cu*' | sort; }

# Whether those of the last build are all there still.
has_libraries() { [ -s "$venv/libraries" ] && xargs ls <"$venv/libraries" >/dev/null 2>&1; }

build_operators() {
  local wanted
  wanted="$PWD $(sources | xargs cksum | cksum)"
  wanted+=" ${USE_CUDA-} ${FORCE_CUDA-} ${TORCH_CUDA_ARCH_LIST-} ${CUDA_HOME-} ${DEBUG-}"
  wanted+=" torch $(python -c 'from importlib.metadata import version; print(version("torch"))')"
  if ! is_done build "$wanted" || ! has_libraries; then
    local compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null ||
      fail "no C++ compiler ($compiler) found: install one (Debian and Ubuntu: apt install g++)"
    step "Building the operators (which takes minutes)" \
      python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
    printf '%s\n' ops/_C*.so >"$venv/libraries"
    printf '%s\n' "$wanted" >"$venv/build.stamp"
    if [ ! -f ops/_C_cuda.abi3.so ]; then
      printf '  for the CPU only (FORCE_CUDA=1 says what CUDA would need)\n'
    fi
  fi
}

unset PYTHONHOME
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 # whatever the user's configuration says: .venv it is
if [ "${1:-}" = nothing ]; then
  return
fi
if ! is_suitable "$venv/bin/python" || [ ! -f "$venv/bin/pip" ]; then
  make_venv
fi
export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
install_requirements
build_operators
