// What the tiled depthwise kernels share: which tap joins which input to which output.
#pragma once

#include <algorithm>

#include "core/cuda/common.cuh"

namespace ops::cuda {

constexpr int kMaxThreads = 256;

inline bool are_aligned(std::initializer_list<const void*> pointers, size_t bytes) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; });
}

// The place of a thread among all of its block.
__device__ inline int flat_thread() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

// x = the V channels that lie in each of kCols loaded positions; integers for the reason that
// load_vector has.
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

// Rounds V values and stores them at once.
template <int V, typename T, typename Acc>
__device__ void store_vector(T* to, const Acc (&x)[V]) {
  Vector<T, V> lanes;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    lanes.lane[v] = static_cast<T>(x[v]);
  }
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  *reinterpret_cast<Bits*>(to) = reinterpret_cast<const Bits&>(lanes);
}

// Into how many parts to split work of `units` steps, done by each of `blocks` blocks of which
// `resident_blocks` run together, where a part costs `extra` steps more: the fewest steps in all
// that the first few numbers of rounds of blocks allow.
inline int64_t best_split(int64_t units, int64_t blocks, int64_t resident_blocks, int64_t extra) {
  constexpr int64_t kMostRounds = 16;
  const int64_t least_rounds = ceil_div(blocks, resident_blocks);
  int64_t best = 1, least = 0;
  for (int64_t rounds = least_rounds; rounds < least_rounds + kMostRounds; ++rounds) {
    const int64_t most = std::max<int64_t>(1, std::min(units, rounds * resident_blocks / blocks));
    const int64_t length = ceil_div(units, most);
    const int64_t parts = ceil_div(units, length);
    const int64_t steps = ceil_div(blocks * parts, resident_blocks) * (length + extra);
    if (least == 0 || steps < least) {
      best = parts, least = steps;
    }
  }
  return best;
}

// One axis of a convolution with K taps, stride S and dilation D, as a thread sees it that computes
// several neighbouring outputs from a window of inputs.
template <int K, int S, int D>
struct Direct {
  static constexpr int kTaps = K;

  // Inputs under `outputs` neighbouring outputs, and from one such window to the next.
  static constexpr int inputs(int outputs) { return (outputs - 1) * S + (K - 1) * D + 1; }
  static constexpr int step(int outputs) { return outputs * S; }

  // The tap that joins output o to input i of the window, or -1.
  static constexpr int tap(int o, int i) {
    const int distance = i - o * S;
    return distance >= 0 && distance % D == 0 && distance / D < K ? distance / D : -1;
  }

  // The image coordinate of the first window's first input.
  static constexpr int start(int padding) { return -padding; }
};

// The same for the gradient with respect to the input of a convolution with stride 2: outputs of
// this axis are the convolution's inputs. (With stride 1 that is a Direct axis with flipped taps.)
template <int K, int kPaddingParity>
struct Transposed {
  static_assert(K % 2 == 1, "the window's first input must not depend on the output's parity");
  static constexpr int kTaps = K;

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

// Calls multiply(q, j, tap, i) for each output in row q, column j of a tile and the input in column
// i of row r of its window that a tap joins.
template <typename Rows, typename Cols, int kRows, int kCols, int kInCols, typename F>
__device__ __forceinline__ void join_row(int r, const F& multiply) {
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const int a = Rows::tap(q, r);
    if (a < 0) {
      continue;
    }
#pragma unroll
    for (int i = 0; i < kInCols; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const int b = Cols::tap(j, i);
        if (b >= 0) {
          multiply(q, j, a * Cols::kTaps + b, i);
        }
      }
    }
  }
}

}  // namespace ops::cuda
