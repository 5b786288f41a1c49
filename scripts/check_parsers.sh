#!/usr/bin/env bash
# Runs the parsers of all commands in each supported version of Python that this machine has (on
# PATH or by pyenv), the first with the oldest packages, and in CPython 3.14 as WebAssembly (npm's
# package pyodide, needs node). Installs the packages that the parsers import in build/parsers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" nothing
interpreter=$(find_python)
log=build/parsers.log # not setup.log: .ci/run runs both in parallel
folder=build/parsers
mkdir -p "$folder"
mapfile -t packages < <(grep -E '^(hydra-core|pydantic)' requirements/app.txt)

install() { # TITLE PYTHON FOLDER ARGUMENTS...
  step "Installing $1" "$2" -m pip install --disable-pip-version-check --no-warn-conflicts \
    --upgrade --target "$folder/$3" "${@:4}"
}

if command -v pyenv >/dev/null; then
  PATH="$PATH:$(printf '%s:' "$(pyenv root)"/versions/*/bin)"
fi
oldest=(--constraint requirements/oldest.txt)
cases=()
for version in 3.10 3.11 3.12 3.13 3.14; do
  python=$(type -ap "python$version" | while read -r path; do
    if is_suitable "$path" && "$path" -m pip --version >/dev/null 2>&1; then
      printf '%s\n' "$path"
      break
    fi
  done) || true
  if [ -z "$python" ]; then
    printf 'Python %s with pip not found: skipped\n' "$version"
    continue
  fi
  install "packages for Python $version" "$python" "$version" "${packages[@]}" "${oldest[@]}"
  PYTHONPATH="$PWD:$PWD/$folder/$version" "$python" -S -s scripts/check_parsers.py "${cases[@]}"
  oldest=()
  cases=(--once) # all of them in the first and the last version
done

if ! command -v node npm >/dev/null; then
  printf 'node and npm not found: Python 3.14 as WebAssembly is skipped\n'
  exit
fi
npm install --silent --no-audit --no-fund --prefix "$folder/npm" pyodide@314
wasm=(--platform pyemscripten_2026_0_wasm32 --python-version 3.14 --only-binary=:all:)
install "Hydra for WebAssembly" "$interpreter" wasm "${packages[0]}" # its packages are pure Python
install "pydantic for WebAssembly" "$interpreter" wasm "${wasm[@]}" "${packages[1]}"
node --input-type=module - "$PWD" "$folder" <<'END'
const [project, folder] = process.argv.slice(2);
const { loadPyodide } = await import(`${project}/${folder}/npm/node_modules/pyodide/pyodide.mjs`);
const python = await loadPyodide();
python.mountNodeFS("/project", project);
python.FS.chdir("/project");
python.globals.set("folder", folder);
process.exitCode = python.runPython(`
import sys
sys.path[:0] = ["/project", f"/project/{folder}/wasm", "scripts"]
import check_parsers
check_parsers.main()
`) > 0 ? 1 : 0;
END
