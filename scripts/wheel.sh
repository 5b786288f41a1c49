#!/usr/bin/env bash
# Builds a wheel into dist/, audits it, and runs the operators' examples of README.md and
# docs/operators.md with it, in an environment that has only PyTorch and NumPy.
#
#   scripts/wheel.sh [VERSION...]
#
# The wheel runs beside every PyTorch from 2.10 on. It has the library for autograd and calls in C++
# of the PyTorch in .venv, and of each VERSION, such as 2.13.0, which is installed for this; beside
# other versions Python does that work. With nvcc it has CUDA kernels, for TORCH_CUDA_ARCH_LIST or all
# architectures since Turing. USE_CUDA=0 leaves them out: the wheel's version ends with +cpu.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" wheel "$@"

unset PYTHONPATH # would find the sources
make_work_folder

# Shared libraries of the environment that a wheel may link: PyTorch's, CUDA's and the system's.
allowed='lib(torch|torch_cpu|torch_python|torch_cuda|c10|c10_cuda|cudart)\.so.*'
allowed+='|lib(stdc\+\+|gcc_s|gomp|c|m|pthread|dl|rt)\.so.*|ld-linux.*\.so.*'

# Checks that the wheel uses only Python's stable ABI and links only allowed libraries.
audit() {
  local wheel=$1 library
  python -m abi3audit --strict --report --output "$work/abi3audit.json" "$wheel"
  printf 'abi3audit: passed\n'
  python -m zipfile -e "$wheel" "$work/unpacked"
  for library in "$work"/unpacked/ops/*.so; do
    if needed "$library" | grep -Evx "$allowed"; then
      fail "${library##*/} links the libraries above, which neither PyTorch nor CUDA provides"
    fi
  done
  python -m auditwheel show "$wheel" | tee "$work/tags"
}

# Gives the wheel the tag of the oldest glibc whose symbols it uses.
set_platform() {
  local tag
  tag=$(grep -oE '"manylinux_[0-9]+_[0-9]+_[a-z0-9_]+"' "$work/tags" | head -n 1 | tr -d '"')
  if [ -n "$tag" ]; then
    python -m wheel tags --remove --platform-tag "$tag" "$1"
  fi
}

# Prints the shared libraries that a library links.
needed() {
  python - "$1" <<'END'
import sys
from elftools.elf.elffile import ELFFile

with open(sys.argv[1], "rb") as file:
    for tag in ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
        print(tag.needed)
END
}

rm -f dist/lenet_ops-*.whl
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX}
if [ "${USE_CUDA-}" = 0 ]; then
  printf '[egg_info]\ntag_build = +cpu\n' >"$work/cpu.cfg"
  export DIST_EXTRA_CONFIG="$work/cpu.cfg"
fi
step "Building the wheel" python -m pip wheel -v --disable-pip-version-check \
  --no-build-isolation --no-deps --wheel-dir dist .
wheel=$(echo "$PWD"/dist/lenet_ops-*.whl)
for version in "$@"; do
  make_environment "$work/$version" "torch==$version" -r requirements/build.txt numpy
  step "Building the library for torch $version" env USE_CUDA=0 ONLY_EAGER=1 \
    "$work/$version/bin/python" setup.py build_ext --build-lib "$work/eager/$version"
  rm -rf "${work:?}/$version"
done
python -m wheel unpack --dest "$work/contents" "$wheel"
if [ $# -gt 0 ]; then
  cp "$work"/eager/*/ops/_C_eager_*.so "$work"/contents/*/ops/
fi
strip --strip-unneeded "$work"/contents/*/ops/*.so
python -m wheel pack --dest-dir dist "$work"/contents/*
audit "$wheel"
set_platform "$wheel"
wheel=$(echo "$PWD"/dist/lenet_ops-*.whl)

make_environment "$work/env" torch "$wheel"
cp README.md docs/operators.md scripts/run_examples.py "$work"
cd "$work"
env/bin/python -c 'import ops, torch; print(f"{ops.__file__} beside torch {torch.__version__}")'
for page in README.md operators.md; do
  env/bin/python run_examples.py "$page" torch ops
done
du -h "$wheel" unpacked/ops/*.so
