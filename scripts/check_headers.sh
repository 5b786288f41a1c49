#!/usr/bin/env bash
# Compiles the sources against the headers of other PyTorch versions, without installing these:
# C++ with -fsyntax-only and, if nvcc is found, CUDA with -fdevice-syntax-only for one architecture.
#
#   scripts/check_headers.sh VERSION...     2.10.0
#
# CXX=aarch64-linux-gnu-g++ cross-compiles; CUDA_ARCH=compute_75 selects another GPU (default: compute_90).
set -euo pipefail
if [ $# = 0 ]; then
  printf 'usage: scripts/check_headers.sh VERSION...\n' >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" nothing
interpreter=$(find_python)
log=build/headers.log # not setup.log: .ci/run runs both in parallel

make_work_folder
python_include=$("$interpreter" -c 'import sysconfig; print(sysconfig.get_path("include"))')
eager=ops/core/eager
target=$(sed -nE 's/^TORCH_TARGET = \(([0-9]+), ([0-9]+)\).*/\1 \2/p' setup.py)
read -r major minor <<<"$target"
target=$(printf -- '-DTORCH_TARGET_VERSION=0x%02x%02x000000000000' "$major" "$minor")

# Downloads a version's headers from its aarch64 wheel: 0.15 GB, and 0.9 GB for x86-64.
get_headers() {
  "$interpreter" -m pip download --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 \
    --python-version 3.11 --dest "$work/$1" "torch==$1"
  "$interpreter" - "$work/$1" <<'END'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    headers = [name for name in archive.namelist() if name.startswith("torch/include/")]
    archive.extractall(folder, headers)
wheel.unlink()
END
}

check_cpp() {
  local include=$1
  find ops -name '*.cpp' -not -path "$eager/*" -print0 |
    xargs -0 -n 1 -P "$(nproc)" "${CXX:-c++}" -fsyntax-only -std=c++17 "$target" -include core/compat.h \
      -Iops -isystem "$include"
  find "$eager" -name '*.cpp' -print0 |
    xargs -0 -n 1 -P "$(nproc)" "${CXX:-c++}" -fsyntax-only -std=c++17 -Iops -isystem "$include" \
      -isystem "$include/torch/csrc/api/include" -isystem "$python_include"
}

# One translation unit: the compiler spends most of its time in PyTorch's headers.
check_cuda() {
  find ops -name '*.cu' -printf '#include "%p"\n' | sort >"$work/all.cu"
  nvcc --cuda -fdevice-syntax-only --expt-relaxed-constexpr -arch="${CUDA_ARCH:-compute_90}" \
    -std=c++17 -DUSE_CUDA "$target" -include core/compat.h -I. -Iops -isystem "$1" -o /dev/null "$work/all.cu"
}

export -f get_headers check_cpp check_cuda
export work eager target python_include interpreter
for version in "$@"; do
  include="$work/$version/torch/include"
  step "Getting the headers of torch $version" bash -euo pipefail -c "get_headers $version"
  step "C++ sources with torch $version" bash -euo pipefail -c "check_cpp $include"
  if command -v nvcc >/dev/null; then
    step "CUDA sources with torch $version" bash -euo pipefail -c "check_cuda $include"
  fi
done
