// CUDA max pooling of square windows with stride 2 in NCHW: a thread takes adjacent pixels.
#pragma once

#include "max_pool2d/cuda/kernels.cuh"

namespace ops::max_pool2d {

// Forward, K×K windows with stride 2, NCHW, out_w = W / 2: V outputs per thread. Padding: 0 for
// 2×2, 1 for 3×3.
//
//      column        2c−1   2c   2c+1   2c+2   2c+3      of each input row a thread loads a vector
//      3×3, window c   0     1     2                     of 2 V and, for 3×3, the element before;
//      window c+1                  0      1      2  …    coordinates are clamped as in
//      2×2, window c         0     1                     forward_kernel
//
template <int K, int V, typename T, typename Indices, typename Divider>
__global__ void __launch_bounds__(kThreads)
    forward_stride_2_kernel(Params<Divider> s, const T* __restrict__ x, T* __restrict__ out,
                            Indices indices) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  constexpr int kPadding = K - 2;
  const auto at = s.template position<1>();
  if (at.thread >= s.threads) {
    return;
  }
  const Signed h = s.g.h, top = 2 * static_cast<Signed>(at.row) - kPadding;
  const Index column = at.column * 2 * V;
  Vector<T, 2 * V> vectors[K];
  T left[K];
  int taps[K];  // of the rows' first elements
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const Signed row = min(max(top + i, Signed{0}), h - 1);
    const T* from = x + ((at.image * h + row) * static_cast<Index>(s.g.w) + column);
    vectors[i] = load_vector<2 * V>(from);
    left[i] = from[kPadding > 0 && column > 0 ? -1 : 0];
    taps[i] = K * (row - top);
  }
  Maxima<T, V, Indices> maxima;
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const auto& lane = vectors[i].lane;
      if constexpr (kPadding > 0) {
        const int outside = v == 0 && column == 0;
        maxima.update(v, v == 0 ? left[i] : lane[2 * v - 1], taps[i] + outside, i == 0);
      }
      maxima.update(v, lane[2 * v], taps[i] + kPadding, kPadding == 0 && i == 0);
      maxima.update(v, lane[2 * v + 1], taps[i] + kPadding + 1);
    }
  }
  maxima.store(out, indices, at.thread * V);
}

// Backward, K×K windows with stride 2 and padding P, NCHW: 2 rows × 2 V columns per thread.
//
//      column          2c   2c+1   2c+2   2c+3      3×3 without padding: an odd column is in one
//      window c−1       2                           window, as tap 1, an even one in two, as taps 2
//      window c         0     1      2              and 0; with padding 1 the reverse. 2×2: a
//      window c+1                    0      1  …    column is in one window. Rows likewise.
//
// S: elements per store, 2 V, or 1 for an odd width.
template <int K, int P, int S, typename T, typename Divider>
__global__ void __launch_bounds__(kThreads)
    backward_stride_2_kernel(Params<Divider> s, const T* __restrict__ grad,
                             const uint8_t* __restrict__ indices, T* __restrict__ out) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  using Acc = acc_t<T>;
  constexpr int V = S == 1 ? 1 : S / 2;
  constexpr int kBefore = (K - 1 - P) / 2;             // windows before window c
  constexpr int kWindows = kBefore + (1 + P) / 2 + 1;  // of a pair of pixels
  constexpr int kColumns = V + kWindows - 1;           // windows of the thread's columns
  constexpr int kLast = P + 2 * kBefore;               // tap of pixel 0 in the first window
  const auto at = s.template position<1>();
  if (at.thread >= s.threads) {
    return;
  }
  const Signed h = s.g.h, w = s.g.w, out_h = s.g.out_h, out_w = s.g.out_w;
  const Signed row = at.row, column = at.column * V, top = row - kBefore, left = column - kBefore;
  Acc sums[2][2 * V] = {};
#pragma unroll
  for (int a = 0; a < kWindows; ++a) {
    const bool row_inside = top + a >= 0 && top + a < out_h;
    const Index from = (at.image * out_h + top + a) * out_w + left;
    Vector<T, V> values{};
    Vector<uint8_t, V> argmax{};
    if (kWindows == 1 && row_inside && left < out_w) {
      values = load_vector<V>(grad + from);
      argmax = load_vector<V>(indices + from);
    }
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      T value = values.lane[b % V];
      int tap = argmax.lane[b % V];
      if (kWindows > 1) {
        const bool inside = row_inside && left + b >= 0 && left + b < out_w;
        value = inside ? grad[from + b] : static_cast<T>(0);
        tap = inside ? indices[from + b] : 0;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * V; ++j) {
          const int tap_row = kLast + i - 2 * a, tap_column = kLast + j - 2 * b;
          if (tap_row >= 0 && tap_row < K && tap_column >= 0 && tap_column < K) {
            sums[i][j] += tap == tap_row * K + tap_column ? static_cast<Acc>(value) : Acc(0);
          }
        }
      }
    }
  }
  T* to = out + (at.image * h + 2 * row) * w + 2 * column;
#pragma unroll
  for (int i = 0; i < 2; ++i, to += w) {
    if (2 * row + i < h) {
      if constexpr (S == 1) {
        to[0] = static_cast<T>(sums[i][0]);
        if (2 * column + 1 < w) {
          to[1] = static_cast<T>(sums[i][1]);
        }
      } else {
        store_vector<S>(to, sums[i]);
      }
    }
  }
}

}  // namespace ops::max_pool2d
