// CUDA max pooling. Forward stores the maximum and, with indices, its tap (row-major position in
// the window).
//
//   forward_kernel                                forward_stride_2_kernel: NCHW, stride 2
//   ┌───┬───┬───┐   V channels (NHWC) or          ┌──┬──┬──┬──┬──┐  of each row a vector of 2 V
//   │   │   │   │   1 channel (NCHW) of           │  │  │  │  │  │  pixels and the pixel before
//   ├───┼───┼───┤   each tap: value, tap          ├──┼──┼──┼──┼──┤
//   │   │   │   │ ─────────────► max, argmax      │  │  │  │  │  │ ──► V maxima, V taps
//   └───┴───┴───┘                                 └──┴──┴──┴──┴──┘
//
//   block:   256 adjacent vectors of outputs; backward: of inputs
//   shared:  nothing; overlapping windows hit the L1 cache
//   thread:  V running maxima and their taps; backward: V sums (NCHW with stride 2: 2 × 2 V), from
//            the windows whose maximum is the thread's pixel, without atomics
#pragma once

#include "core/cuda/divide.cuh"
#include "max_pool2d/op.h"

namespace ops::max_pool2d {

using namespace ops::cuda;

constexpr int kThreads = 256;

// First element of a thread's vector.
template <typename Index>
struct Position {
  Index image, row, column, channel;
};

// Kernel parameters. Divider is FastDivide (32-bit indices) or Divide (64-bit). One thread per
// vector of `width` elements of an image of rows × columns pixels.
template <typename Divider>
struct Params {
  using Index = typename Divider::Index;
  using Signed = std::make_signed_t<Index>;

  Geometry g;
  Index rows, columns, pixel;  // `pixel` elements each: C (channels-last) or 1
  Index threads;
  Divider by_vectors, by_columns, by_rows, by_stride_h, by_stride_w, by_dilation_h, by_dilation_w;

  Params(const Geometry& g, int64_t rows, int64_t columns, int64_t width)
      : g(g),
        rows(rows),
        columns(columns),
        pixel(g.channels_last ? g.c : 1),
        threads(g.n * g.c * rows * columns / width),
        by_vectors{g.channels_last ? g.c / width : 1},
        by_columns{columns},
        by_rows{rows},
        by_stride_h{g.stride_h},
        by_stride_w{g.stride_w},
        by_dilation_h{g.dilation_h},
        by_dilation_w{g.dilation_w} {}

  __device__ Index thread() const {
    return static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  }

  template <int V>
  __device__ Position<Index> position(Index thread) const {
    const Index at = by_vectors(thread), row = by_columns(at), image = by_rows(row);
    return {image, row - image * rows, at - row * columns, thread * V - at * pixel};
  }
};

// Running maxima of V windows and their taps. As in PyTorch: the first of equal elements wins, the
// last NaN wins.
template <typename T, int V>
struct Maxima {
  acc_t<T> value[V];
  int tap[V];

  __device__ void update(int v, T x, int at, bool first = false) {
    const auto y = static_cast<acc_t<T>>(x);
    if (first || y > value[v] || y != y) {
      value[v] = y;
      tap[v] = at;
    }
  }

  template <typename Indices>
  __device__ void store(T* out, Indices indices, int64_t at) const {
    store_vector<V>(out + at, value);
    if constexpr (std::is_pointer_v<Indices>) {
      store_vector<V>(indices + at, tap);
    }
  }
};

// Forward. K: compile-time K×K window without dilation; 0: any window.
template <int K, int V, typename T, typename Indices, typename Divider>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Params<Divider> s, const T* __restrict__ x, T* __restrict__ out,
                   Indices indices) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  const Index thread = s.thread();
  if (thread >= s.threads) {
    return;
  }
  const auto at = s.template position<V>(thread);
  const Signed h = s.g.h, w = s.g.w, kernel_h = K > 0 ? K : s.g.kernel_h,
               kernel_w = K > 0 ? K : s.g.kernel_w, dilation_h = K > 0 ? 1 : s.g.dilation_h,
               dilation_w = K > 0 ? 1 : s.g.dilation_w;
  const Signed top = static_cast<Signed>(at.row) * s.g.stride_h - s.g.padding_h;
  const Signed left = static_cast<Signed>(at.column) * s.g.stride_w - s.g.padding_w;
  const auto rows = taps_inside(top, h, kernel_h, dilation_h, s.by_dilation_h);
  const auto columns = taps_inside(left, w, kernel_w, dilation_w, s.by_dilation_w);
  const Index image = at.image * (h * w * s.pixel) + at.channel;
  Maxima<T, V> maxima;
#pragma unroll
  for (int v = 0; v < V; ++v) {  // of padding alone
    maxima.value[v] = -INFINITY;
    maxima.tap[v] = kNoTap;
  }
  const auto update = [&](Signed i, Signed j, bool first) {
    const Index pixel = (top + i * dilation_h) * w + left + j * dilation_w;
    const auto values = load_vector<V>(x + (image + pixel * s.pixel));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      maxima.update(v, values.lane[v], static_cast<int>(i * kernel_w + j), first);
    }
  };
  if constexpr (K > 0) {  // taps are clamped, not skipped: all loads are in flight
#pragma unroll
    for (int i = 0; i < K * K; ++i) {
      update(rows.clamp(i / K), columns.clamp(i % K), i == 0);
    }
  } else {
    for (Signed i = rows.first; i < rows.end; ++i) {
      for (Signed j = columns.first; j < columns.end; ++j) {
        update(i, j, i == rows.first && j == columns.first);
      }
    }
  }
  maxima.store(out, indices, thread * V);
}

// Backward: each pixel sums the gradients of the windows that contain it.
template <int V, typename T, typename I, typename Divider>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Params<Divider> s, const T* __restrict__ grad, const I* __restrict__ indices,
                    T* __restrict__ out) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  const Index thread = s.thread();
  if (thread >= s.threads) {
    return;
  }
  const auto at = s.template position<V>(thread);
  const Signed out_h = s.g.out_h, out_w = s.g.out_w, stride_h = s.g.stride_h,
               stride_w = s.g.stride_w, dilation_h = s.g.dilation_h, dilation_w = s.g.dilation_w;
  const Signed y = at.row + s.g.padding_h, x = at.column + s.g.padding_w;  // padded coordinates
  const Signed span_h = (s.g.kernel_h - 1) * dilation_h, span_w = (s.g.kernel_w - 1) * dilation_w;
  const Signed first_row = y > span_h ? s.by_stride_h(y - span_h + stride_h - 1) : 0;
  const Signed first_column = x > span_w ? s.by_stride_w(x - span_w + stride_w - 1) : 0;
  const Index image = at.image * (out_h * out_w * s.pixel) + at.channel;

  acc_t<T> sums[V] = {};
  for (Signed row = first_row; row < out_h && row * stride_h <= y; ++row) {
    const Signed distance_h = y - row * stride_h;
    const Signed i = dilation_h == 1 ? distance_h : s.by_dilation_h(distance_h);
    if (i * dilation_h != distance_h) {
      continue;
    }
    for (Signed column = first_column; column < out_w && column * stride_w <= x; ++column) {
      const Signed distance_w = x - column * stride_w;
      const Signed j = dilation_w == 1 ? distance_w : s.by_dilation_w(distance_w);
      if (j * dilation_w != distance_w) {
        continue;
      }
      const Index from = image + (row * out_w + column) * s.pixel;
      const auto values = load_vector<V>(grad + from);
      const auto argmax = load_vector<V>(indices + from);
      const auto tap = static_cast<I>(i * s.g.kernel_w + j);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (argmax.lane[v] == tap) {
          sums[v] += static_cast<acc_t<T>>(values.lane[v]);
        }
      }
    }
  }
  store_vector<V>(out + thread * V, sums);
}

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
  const Index thread = s.thread();
  if (thread >= s.threads) {
    return;
  }
  constexpr int kPadding = K - 2;
  const auto at = s.template position<1>(thread);
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
  Maxima<T, V> maxima;
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
  maxima.store(out, indices, thread * V);
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
  const Index thread = s.thread();
  if (thread >= s.threads) {
    return;
  }
  const auto at = s.template position<1>(thread);
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
