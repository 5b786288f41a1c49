// Run-time detection of the processor's instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace ops::cpu {

enum class Isa { baseline, avx2, avx512 };

// Return the widest supported instruction set, limited by ATEN_CPU_CAPABILITY as in torch.
inline Isa isa() {
  static const Isa best = [] {
    const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
#if defined(__x86_64__)
    if (limit && std::strcmp(limit, "default") == 0) {
      return Isa::baseline;
    }
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
      return Isa::baseline;
    }
    if (limit && std::strcmp(limit, "avx2") == 0) {
      return Isa::avx2;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::avx512;
    }
    return Isa::avx2;
#else
    (void)limit;
    return Isa::baseline;
#endif
  }();
  return best;
}

inline int64_t vector_bytes() {
  return isa() == Isa::avx512 ? 64 : isa() == Isa::avx2 ? 32 : 16;
}

}  // namespace ops::cpu
