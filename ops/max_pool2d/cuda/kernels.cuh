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

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda/divide.cuh"
#include "max_pool2d/op.h"

namespace ops::max_pool2d {

using namespace ops::cuda;

constexpr int kThreads = 256;

// Kernel parameters. Divider is FastDivide (32-bit indices) or Divide (64-bit).
template <typename Divider>
struct Params {
  using Index = typename Divider::Index;
  using Signed = std::make_signed_t<Index>;

  Signed h, w, out_h, out_w;
  Signed kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  Signed pixel;  // elements per pixel: C (channels-last) or 1
  Index threads;
  Divider by_vectors, by_width, by_height, by_stride_h, by_stride_w;

  // One thread per vector of `width` elements of an image of rows × columns pixels.
  Params(const Geometry& g, int64_t rows, int64_t columns, int64_t width)
      : h(g.h),
        w(g.w),
        out_h(g.out_h),
        out_w(g.out_w),
        kernel_h(g.kernel_h),
        kernel_w(g.kernel_w),
        stride_h(g.stride_h),
        stride_w(g.stride_w),
        padding_h(g.padding_h),
        padding_w(g.padding_w),
        dilation_h(g.dilation_h),
        dilation_w(g.dilation_w),
        pixel(g.channels_last ? g.c : 1),
        threads(g.n * g.c * rows * columns / width),
        by_vectors{g.channels_last ? g.c / width : 1},
        by_width{columns},
        by_height{rows},
        by_stride_h{g.stride_h},
        by_stride_w{g.stride_w} {}
};

// First element of the thread's vector.
template <typename Index>
struct Position {
  Index image, row, column, channel;
};

template <int V, typename Divider, typename Index = typename Divider::Index>
__device__ Position<Index> position_of(const Params<Divider>& s, Index thread, Index rows,
                                       Index columns) {
  const Index pixel = s.by_vectors(thread), row = s.by_width(pixel), image = s.by_height(row);
  return {image, row - image * rows, pixel - row * columns,
          thread * V - pixel * static_cast<Index>(s.pixel)};
}

template <typename Index>
__device__ Index thread_index() {
  return static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
}

// Return the maximum, NaN if an operand is NaN, of two zeros either. One instruction from compute
// capability 8.0 on.
template <typename T>
__device__ T max_nan(T a, T b) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, float>) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
  } else if constexpr (std::is_same_v<T, Half>) {
    return __hmax_nan(static_cast<__half>(a), static_cast<__half>(b));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __hmax_nan(static_cast<__nv_bfloat16>(a), static_cast<__nv_bfloat16>(b));
  }
#endif
  const auto x = static_cast<acc_t<T>>(a), y = static_cast<acc_t<T>>(b);
  return y > x || y != y ? b : a;
}

// Running maximum and its tap. As in PyTorch: the first of equal elements wins, the last NaN wins.
template <typename T, typename Indices>
struct RunningMax {
  acc_t<T> value = -INFINITY;
  int tap = kNoTap;

  __device__ void update(T x, int at, bool first = false) {
    const auto v = static_cast<acc_t<T>>(x);
    if (first || v > value || v != v) {
      value = v;
      tap = at;
    }
  }
};

template <typename T>
struct RunningMax<T, NoIndices> {
  T value = static_cast<T>(-INFINITY);

  __device__ void update(T x, int, bool first = false) { value = first ? x : max_nan(value, x); }
};

// Store V adjacent maxima and, unless Indices is NoIndices, their taps.
template <typename T, int V, typename Indices>
__device__ void store(const RunningMax<T, Indices> (&maxima)[V], T* out, Indices indices) {
  Vector<T, V> values;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    values.lane[v] = static_cast<T>(maxima[v].value);
  }
  *reinterpret_cast<Vector<T, V>*>(out) = values;
  if constexpr (std::is_pointer_v<Indices>) {
    using I = std::remove_pointer_t<Indices>;
    Vector<I, V> taps;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      taps.lane[v] = static_cast<I>(maxima[v].tap);
    }
    *reinterpret_cast<Vector<I, V>*>(indices) = taps;
  }
}

// Forward. K: compile-time K×K window without dilation; 0: any window.
template <int K, int V, typename T, typename Indices, typename Divider>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Params<Divider> s, const T* __restrict__ x, T* __restrict__ out,
                   Indices indices) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const auto at =
      position_of<V>(s, thread, static_cast<Index>(s.out_h), static_cast<Index>(s.out_w));
  const Signed top = static_cast<Signed>(at.row) * s.stride_h - s.padding_h;
  const Signed left = static_cast<Signed>(at.column) * s.stride_w - s.padding_w;
  const Index row_step = s.w * s.pixel, image = at.image * (s.h * row_step) + at.channel;
  RunningMax<T, Indices> running_max[V];
  const auto update = [&](Signed row, Signed column, Signed tap, bool first) {
    const auto values = load_vector<V>(x + (image + row * row_step + column * s.pixel));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      running_max[v].update(values.lane[v], static_cast<int>(tap), first);
    }
  };
  if constexpr (K > 0) {  // clamp coordinates: the edge pixel is in the window anyway
    Signed rows[K], columns[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      rows[i] = min(max(top + i, Signed{0}), s.h - 1);
      columns[i] = min(max(left + i, Signed{0}), s.w - 1);
    }
#pragma unroll
    for (int i = 0; i < K * K; ++i) {
      const Signed row = rows[i / K], column = columns[i % K];
      update(row, column, (row - top) * K + column - left, i == 0);
    }
  } else {
    bool first = true;
    for (Signed i = 0; i < s.kernel_h; ++i) {
      for (Signed j = 0; j < s.kernel_w; ++j) {
        const Signed row = top + i * s.dilation_h, column = left + j * s.dilation_w;
        if (row >= 0 && row < s.h && column >= 0 && column < s.w) {
          update(row, column, i * s.kernel_w + j, first);
          first = false;
        }
      }
    }
  }
  indices += thread * V;
  store(running_max, out + thread * V, indices);
}

// Backward: each pixel sums the gradients of the windows that contain it.
template <int V, typename T, typename I, typename Divider>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Params<Divider> s, const T* __restrict__ grad, const I* __restrict__ indices,
                    T* __restrict__ out) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const auto at = position_of<V>(s, thread, static_cast<Index>(s.h), static_cast<Index>(s.w));
  const Signed y = static_cast<Signed>(at.row) + s.padding_h;  // padded coordinates
  const Signed x = static_cast<Signed>(at.column) + s.padding_w;
  const Signed span_h = (s.kernel_h - 1) * s.dilation_h, span_w = (s.kernel_w - 1) * s.dilation_w;
  const Signed first_row = y > span_h ? s.by_stride_h(y - span_h + s.stride_h - 1) : 0;
  const Signed first_column = x > span_w ? s.by_stride_w(x - span_w + s.stride_w - 1) : 0;
  const Index image = at.image * (s.out_h * s.out_w * s.pixel) + at.channel;

  acc_t<T> sums[V] = {};
  for (Signed row = first_row; row < s.out_h && row * s.stride_h <= y; ++row) {
    const Signed distance_h = y - row * s.stride_h;
    if (s.dilation_h > 1 && distance_h % s.dilation_h != 0) {
      continue;
    }
    const Signed i = s.dilation_h > 1 ? distance_h / s.dilation_h : distance_h;
    for (Signed column = first_column; column < s.out_w && column * s.stride_w <= x; ++column) {
      const Signed distance_w = x - column * s.stride_w;
      if (s.dilation_w > 1 && distance_w % s.dilation_w != 0) {
        continue;
      }
      const Signed j = s.dilation_w > 1 ? distance_w / s.dilation_w : distance_w;
      const Index from = image + (row * s.out_w + column) * s.pixel;
      const auto values = load_vector<V>(grad + from);
      const auto argmax = *reinterpret_cast<const Vector<I, V>*>(indices + from);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (argmax.lane[v] == static_cast<I>(i * s.kernel_w + j)) {
          sums[v] += static_cast<acc_t<T>>(values.lane[v]);
        }
      }
    }
  }
  Vector<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    result.lane[v] = static_cast<T>(sums[v]);
  }
  reinterpret_cast<Vector<T, V>*>(out)[thread] = result;
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
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const Index line = s.by_width(thread), image = s.by_height(line);
  constexpr int kPadding = K - 2;
  const Signed top = 2 * static_cast<Signed>(line - image * s.out_h) - kPadding;
  const Index column = (thread - line * (s.out_w / V)) * 2 * V;
  Vector<T, 2 * V> vectors[K];
  T left[K];
  int taps[K];  // of the rows' first elements
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const Signed row = min(max(top + i, Signed{0}), s.h - 1);
    const T* from = x + ((image * s.h + row) * s.w + column);
    vectors[i] = load_vector<2 * V>(from);
    left[i] = from[kPadding > 0 && column > 0 ? -1 : 0];
    taps[i] = K * (row - top);
  }
  RunningMax<T, Indices> running_max[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const auto& lane = vectors[i].lane;
      if constexpr (kPadding > 0) {
        const int outside = v == 0 && column == 0;
        running_max[v].update(v == 0 ? left[i] : lane[2 * v - 1], taps[i] + outside, i == 0);
      }
      running_max[v].update(lane[2 * v], taps[i] + kPadding, kPadding == 0 && i == 0);
      running_max[v].update(lane[2 * v + 1], taps[i] + kPadding + 1);
    }
  }
  indices += thread * V;
  store(running_max, out + thread * V, indices);
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
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const Signed rows = (s.h + 1) / 2, columns = (s.w + 2 * V - 1) / (2 * V);
  const Signed line = s.by_width(thread), image = s.by_height(line);
  const Signed row = line - image * rows;
  const Signed column = (static_cast<Signed>(thread) - line * columns) * V;
  const Signed top = row - kBefore, left = column - kBefore;
  Acc sums[2][2 * V] = {};
#pragma unroll
  for (int a = 0; a < kWindows; ++a) {
    const bool row_inside = top + a >= 0 && top + a < s.out_h;
    const Index from = (image * s.out_h + top + a) * s.out_w + left;
    Vector<T, V> values{};
    Vector<uint8_t, V> argmax{};
    if (kWindows == 1 && row_inside && left < s.out_w) {
      values = load_vector<V>(grad + from);
      argmax = *reinterpret_cast<const Vector<uint8_t, V>*>(indices + from);
    }
#pragma unroll
    for (int b = 0; b < kColumns; ++b) {
      T value = values.lane[b % V];
      int tap = argmax.lane[b % V];
      if (kWindows > 1) {
        const bool inside = row_inside && left + b >= 0 && left + b < s.out_w;
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
  T* to = out + (static_cast<Index>(image) * s.h + 2 * row) * s.w + 2 * column;
#pragma unroll
  for (int i = 0; i < 2; ++i, to += s.w) {
    if (2 * row + i < s.h) {
      if constexpr (S == 1) {
        to[0] = static_cast<T>(sums[i][0]);
        if (2 * column + 1 < s.w) {
          to[1] = static_cast<T>(sums[i][1]);
        }
      } else {
        store_vector<S>(to, sums[i]);
      }
    }
  }
}

}  // namespace ops::max_pool2d
