// Division of indices by a divisor known on the host.
#pragma once

#include "core/cuda/common.cuh"

namespace ops::cuda {

constexpr int64_t kMostFastDivided = int64_t{1} << 31;  // exclusive limit of FastDivide's dividends

// Division by an invariant (Granlund and Montgomery): n / divisor = (⌊m n / 2³²⌋ + n) / 2ˢ for
// n < 2³¹, with s = ⌈log₂ divisor⌉ and m = ⌊2³² (2ˢ − divisor) / divisor⌋ + 1.
struct FastDivide {
  using Index = unsigned;
  unsigned multiplier, shift = 0;

  explicit FastDivide(int64_t divisor) {
    while ((int64_t{1} << shift) < divisor) {
      ++shift;
    }
    const uint64_t more = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    multiplier = static_cast<unsigned>((more << 32) / divisor + 1);
  }
  __device__ unsigned operator()(unsigned n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

struct Divide {  // 64-bit, with the interface of FastDivide
  using Index = int64_t;
  int64_t divisor;

  explicit Divide(int64_t d) : divisor(d) {}
  __device__ int64_t operator()(int64_t n) const { return n / divisor; }
};

}  // namespace ops::cuda
