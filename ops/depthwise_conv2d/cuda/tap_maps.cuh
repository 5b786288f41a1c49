// Compile-time maps from (output, tap) to input index; helpers of the depthwise kernels.
#pragma once

#include <algorithm>

#include "core/cuda/common.cuh"

namespace ops::cuda {

constexpr int kMaxThreads = 256;

__device__ inline int flat_thread() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

// Convert kCols loaded vectors of V channels to float32. Bits: see load_vector.
template <typename T, typename Bits, int kCols, int V>
__device__ void widen(const Bits (&bits)[kCols], float (&x)[kCols][V]) {
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    const auto& lanes = reinterpret_cast<const Vector<T, V>&>(bits[i]);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[i][v] = static_cast<float>(lanes.lane[v]);
    }
  }
}

// Round V values and store them with one instruction.
template <int V, typename T, typename Acc>
__device__ void store_vector(T* to, const Acc (&x)[V]) {
  Vector<T, V> lanes;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    lanes.lane[v] = static_cast<T>(x[v]);
  }
  store_vector(to, lanes);
}

// Return the number of parts to split work into. Each of `blocks` blocks has `units` steps of work;
// `resident_blocks` run at once; each part costs `extra` steps. Minimises waves × steps of a part.
inline int64_t best_split(int64_t units, int64_t blocks, int64_t resident_blocks, int64_t extra) {
  constexpr int64_t kMaxWaves = 16;
  const int64_t min_waves = ceil_div(blocks, resident_blocks);
  int64_t best = 1, min_steps = 0;
  for (int64_t waves = min_waves; waves < min_waves + kMaxWaves; ++waves) {
    const int64_t max_parts =
        std::max<int64_t>(1, std::min(units, waves * resident_blocks / blocks));
    const int64_t length = ceil_div(units, max_parts);
    const int64_t parts = ceil_div(units, length);
    const int64_t steps = ceil_div(blocks * parts, resident_blocks) * (length + extra);
    if (min_steps == 0 || steps < min_steps) {
      best = parts, min_steps = steps;
    }
  }
  return best;
}

// Start to copy kBytes bytes to an address in shared memory. (Unlike cuda_pipeline.h, these
// functions are barriers for the compiler.)
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

// One axis of a convolution with K taps, stride S and dilation D: maps between a tile of adjacent
// outputs and its window of inputs.
template <int K, int S, int D>
struct Direct {
  static constexpr int kTaps = K, kStride = S, kDilation = D;
  static constexpr bool kTransposed = false;

  // Return the window size of `outputs` adjacent outputs, and the step to the next window.
  static constexpr int inputs(int outputs) { return (outputs - 1) * S + (K - 1) * D + 1; }
  static constexpr int step(int outputs) { return outputs * S; }

  // Return the tap with which output o reads input i of the window, or −1.
  static constexpr int tap(int o, int i) {
    const int distance = i - o * S;
    return distance >= 0 && distance % D == 0 && distance / D < K ? distance / D : -1;
  }

  // Return the image coordinate of the first window.
  static constexpr int start(int padding) { return -padding; }
};

// The same maps for the input gradient with stride 2: outputs are grad_input, inputs grad_output.
// (With stride 1 it is a Direct axis with a flipped filter.)
template <int K, int kPaddingParity>
struct Transposed {
  static_assert(K % 2 == 1, "the window's first input must not depend on the output's parity");
  static constexpr int kTaps = K, kStride = 2, kDilation = 1;
  static constexpr bool kTransposed = true;

  static constexpr int inputs(int outputs) {
    return (outputs - 1 + kPaddingParity) / 2 + (K - 1) / 2 + 1;
  }
  static constexpr int step(int outputs) { return outputs / 2; }
  static constexpr int tap(int o, int i) {
    const int t = o + kPaddingParity + (K - 1) - 2 * i;
    return t >= 0 && t < K ? t : -1;
  }
  static constexpr int start(int padding) { return padding / 2 - (K - 1) / 2; }
};

// Call multiply(j, tap, i) for each output j of a row and each tap of it; i is the window column.
template <typename Cols, int kCols, int kInCols, typename F>
__device__ __forceinline__ void for_each_column_tap(const F& multiply) {
#pragma unroll
  for (int i = 0; i < kInCols; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (const int tap = Cols::tap(j, i); tap >= 0) {
        multiply(j, tap, i);
      }
    }
  }
}

// Call multiply(q, j, tap, i) for each output (q, j) of a tile and each tap of it that reads window
// row r; i is the window column.
template <typename Rows, typename Cols, int kRows, int kCols, int kInCols, typename F>
__device__ __forceinline__ void for_each_tap(int r, const F& multiply) {
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const int a = Rows::tap(q, r);
    if (a >= 0) {
      for_each_column_tap<Cols, kCols, kInCols>(
          [&](int j, int b, int i) { multiply(q, j, a * Cols::kTaps + b, i); });
    }
  }
}

}  // namespace ops::cuda
