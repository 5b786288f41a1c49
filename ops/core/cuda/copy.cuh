// Asynchronous copies from global to shared memory (cp.async). Below compute capability 8.0: loads
// and stores. With cp.async they are compiler barriers ("memory"); those of cuda_pipeline.h are
// not.
#pragma once

#include "core/cuda/common.cuh"

namespace ops::cuda {

__device__ inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Start to copy kBytes bytes to an address in shared memory.
template <int kBytes>
__device__ void copy_async(unsigned to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
  }
#else
  using Bits = typename BitsOf<kBytes>::type;
  *static_cast<Bits*>(__cvta_shared_to_generic(to)) = *static_cast<const Bits*>(from);
#endif
}

// Start to copy 16 bytes if `inside`, else to write zeros. `from` must be valid in both cases.
__device__ inline void copy_async_or_zero(unsigned to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(__cvta_shared_to_generic(to)) =
      inside ? *static_cast<const uint4*>(from) : uint4{};
#endif
}

// Return the L2 cache policy of loads: evict-first if `streaming`, otherwise the default.
__device__ inline uint64_t l2_policy(bool streaming) {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  if (streaming) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
#endif
  return policy;
}

// Start to copy with a policy of l2_policy.
template <int kBytes>
__device__ void copy_async(unsigned to, const void* from, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(from), "n"(kBytes), "l"(policy)
                 : "memory");
  }
#else
  copy_async<kBytes>(to, from);
#endif
}

__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for all groups of copies but the newest kNewest.
template <int kNewest>
__device__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

}  // namespace ops::cuda
