"""Rounding to bfloat16 in the CPU kernels, for every NaN of float32."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

PROGRAM = """
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "core/cpu/simd.h"

#define OPS_ISA test
#define OPS_UNROLL
#define OPS_VECTOR_BYTES {bytes}
#include "core/cpu/vec.h"

int main() {{
  constexpr int N = {bytes} / sizeof(float);
  long lost = 0;
  for (unsigned first = 0x7f800000; first < 0x80000000; first += N / 2) {{
    ops::cpu::Vec<float, N> v;
    unsigned bits[N];  // of both signs
    for (int i = 0; i < N; ++i) {{
      bits[i] = (first + i / 2) | i % 2 * 0x80000000;
    }}
    std::memcpy(&v, bits, sizeof(v));
    unsigned short out[N];
    ops::cpu::test::store<N>(reinterpret_cast<ops::BFloat16*>(out), v);
    for (int i = 0; i < N; ++i) {{
      const bool is_nan = (out[i] & 0x7fff) > 0x7f80;
      lost += is_nan != ((bits[i] & 0x7fffffff) > 0x7f800000);
    }}
  }}
  std::printf("%ld", lost);
}}
"""
FLAGS = {16: [], 32: ["-mavx2", "-mfma", "-mf16c"]}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("vector_bytes", FLAGS)
def test_every_nan_stays_nan(tmp_path, vector_bytes):
    if vector_bytes == 32 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
        pytest.skip("needs AVX2")
    source = tmp_path / "store.cpp"
    source.write_text(PROGRAM.format(bytes=vector_bytes))
    ops = Path(__file__).parents[2] / "ops"
    includes = [f"-I{path}" for path in (ops, *include_paths())]
    flags = ["-O2", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", *FLAGS[vector_bytes]]
    command = ["g++", *flags, *includes, str(source), "-o", str(tmp_path / "store")]
    subprocess.run(command, check=True)
    lost = subprocess.run([tmp_path / "store"], check=True, capture_output=True, text=True).stdout
    assert lost == "0"
