#!/usr/bin/env bash
# Installs the compiler and headers of the CUDA version of PyTorch in .venv (13.0 or newer) from PyPI,
# and prints the folder: CUDA_HOME of a build on a machine without the CUDA toolkit.
#
#   export CUDA_HOME=$(scripts/cuda.sh)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" wheel >&2

version=$(python -c 'import torch; print(torch.version.cuda)')
folder=build/cuda-$version
step "Installing CUDA $version" python -m pip install --disable-pip-version-check --no-deps --upgrade \
  --target "$folder" nvidia-{cuda-nvcc,cuda-crt,nvvm,cuda-runtime,cuda-cccl}=="$version.*" >&2
root="$PWD/$folder/nvidia/cu${version%%.*}"
ln -sfn lib "$root/lib64"
ln -sf "$(basename "$root"/lib/libcudart.so.*)" "$root/lib/libcudart.so"
printf '%s\n' "$root"
