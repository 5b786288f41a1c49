# shellcheck shell=bash
# Makes .venv, installs the requirements and builds the operators; skips steps that are up to date.
#
#   source scripts/setup.sh           requirements of the commands, operators
#   source scripts/setup.sh test      requirements of the tests, operators
#   source scripts/setup.sh tools     requirements of the tests
#   source scripts/setup.sh wheel     requirements of scripts/wheel.sh
#   source scripts/setup.sh nothing   only the functions below
#
# Changes to the project's folder and puts .venv first on PATH. PYTHON is the interpreter of a new
# .venv. Builds the CPU kernels and, if PyTorch sees GPUs, the CUDA kernels for their architectures.
# USE_CUDA, FORCE_CUDA and TORCH_CUDA_ARCH_LIST override this: see setup.py.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$PWD/.venv"
requirements="requirements.txt"
case ${1:-} in
  test | tools) requirements="requirements-test.txt" ;;
  wheel) requirements="requirements/wheel.txt" ;;
esac

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Usage: step TITLE COMMAND... Shows the command's progress; its output goes to a log.
step() {
  local title=$1
  shift
  "${interpreter:-python}" scripts/progress.py "$title" "${log:-build/setup.log}" "$@"
}

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints the interpreter: PYTHON if set, else python3 if it is 3.10 or newer, else the newest one.
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

# Lists the C++ and CUDA sources.
list_sources() {
  find ops -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) "$@"
}

# Usage: is_done STEP INPUTS. Succeeds if the step's stamp equals its inputs.
is_done() { [ -f "$venv/$1.stamp" ] && [ "$(cat "$venv/$1.stamp")" = "$2" ]; }

make_venv() {
  local interpreter
  interpreter=$(find_python)
  "$interpreter" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$interpreter has no venv module: install it (Debian and Ubuntu: apt install python3-venv)"
  step "Making .venv with $("$interpreter" --version)" "$interpreter" -m venv "$venv"
  rm -f "$venv"/*.stamp
}

install_requirements() {
  local wanted
  wanted="$requirements $(cat requirements*.txt requirements/*.txt | cksum)"
  if is_done requirements "$wanted"; then
    return
  fi
  local install=(python -m pip install --disable-pip-version-check -r "$requirements")
  if [ -t 1 ]; then # pip shows a progress bar
    printf 'Installing %s (PyTorch is a large download the first time)\n' "$requirements"
    "${install[@]}" || fail "this failed: ${install[*]}"
  else
    step "Installing $requirements (PyTorch is a large download the first time)" "${install[@]}"
  fi
  printf '%s\n' "$wanted" >"$venv/requirements.stamp"
}

# Prints the architectures of the GPUs that PyTorch can use: 8.0;9.0, or nothing.
visible_architectures() {
  python - 2>/dev/null <<'END' || true
import torch

if torch.cuda.is_available():
    gpus = range(torch.cuda.device_count())
    pairs = {torch.cuda.get_device_capability(gpu) for gpu in gpus}
    print(";".join(f"{major}.{minor}" for major, minor in sorted(pairs)))
END
}

# Prints setup.py's variable for this machine's kernels; nothing if the user has set one.
choose_kernels() {
  if [ -n "${USE_CUDA-}${FORCE_CUDA-}${TORCH_CUDA_ARCH_LIST-}" ]; then
    return
  fi
  local architectures
  architectures=$(visible_architectures)
  if [ -n "$architectures" ]; then
    printf 'TORCH_CUDA_ARCH_LIST=%s\n' "$architectures"
  else
    printf 'USE_CUDA=0\n'
  fi
}

# Succeeds if all libraries of the last build exist.
has_libraries() { [ -s "$venv/libraries" ] && xargs ls <"$venv/libraries" >/dev/null 2>&1; }

build_operators() {
  local kernels wanted
  kernels=$(choose_kernels)
  wanted="$PWD $(list_sources -exec cksum {} + | sort | cat - setup.py pyproject.toml | cksum)"
  wanted+=" ${USE_CUDA-} ${FORCE_CUDA-} ${TORCH_CUDA_ARCH_LIST-} ${CUDA_HOME-} ${DEBUG-} $kernels"
  wanted+=" torch $(python -c 'from importlib.metadata import version; print(version("torch"))')"
  if is_done build "$wanted" && has_libraries; then
    return
  fi
  local compiler=${CXX:-c++}
  command -v "${compiler%% *}" >/dev/null ||
    fail "no C++ compiler ($compiler) found: install one (Debian and Ubuntu: apt install g++)"
  if [ "$kernels" = USE_CUDA=0 ]; then
    printf 'No GPU is visible: building CPU kernels only (FORCE_CUDA=1 builds CUDA kernels, too)\n'
  fi
  step "Building the operators" env ${kernels:+"$kernels"} \
    python -m pip install -v --disable-pip-version-check --no-build-isolation --no-deps -e .
  printf '%s\n' ops/_C*.so >"$venv/libraries"
  printf '%s\n' "$wanted" >"$venv/build.stamp"
}

# Makes the folder $work and removes it on exit; in build/, as PyTorch takes gigabytes and /tmp may
# be a RAM disk.
make_work_folder() {
  mkdir -p build
  work=$(mktemp -d "$PWD/build/work.XXXXXX")
  trap 'rm -rf "$work"' EXIT
}

# Usage: make_environment FOLDER REQUIREMENT... Makes an environment and installs the requirements.
make_environment() {
  local folder=$1
  shift
  step "Making an environment" "$(find_python)" -m venv --clear "$folder"
  step "Installing $*" \
    "$folder/bin/python" -m pip install --disable-pip-version-check "$@"
}

# Usage: build_wheel FOLDER [PYTHON SOURCE]. Default: this project, with the Python in .venv.
build_wheel() {
  local kernels
  kernels=$(choose_kernels)
  step "Building a wheel" env ${kernels:+"$kernels"} \
    "${2:-python}" -m pip wheel -v --disable-pip-version-check --no-build-isolation --no-deps \
    --wheel-dir "$1" "${3:-.}"
}

unset PYTHONHOME
export NINJA_STATUS='[%f/%t] ' # parsed by scripts/progress.py
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 # override the user's pip configuration
export PIP_COMPILE=0 # Python compiles modules when they are first imported
unset PYTHONDONTWRITEBYTECODE # without the files, each process would compile PyTorch anew: 2 s
if [ "${1:-}" = nothing ]; then
  return
fi
if ! is_suitable "$venv/bin/python" || [ ! -f "$venv/bin/pip" ]; then
  make_venv
fi
export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
install_requirements
if [ "${1:-}" != tools ] && [ "${1:-}" != wheel ]; then
  build_operators
fi
