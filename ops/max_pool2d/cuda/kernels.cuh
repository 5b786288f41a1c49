// CUDA max pooling. Forward stores the maximum and, with indices, its tap (row-major position in
// the window).
//
//   forward_kernel                                forward_stride_2_kernel (stride_2.cuh)
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

// A thread and the first element of its vector.
template <typename Index>
struct Position {
  Index thread, image, row, column, channel;
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
  Divider by_vectors, by_columns, by_rows, by_stride_h, by_stride_w;

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
        by_stride_w{g.stride_w} {}

  template <int V>
  __device__ Position<Index> position() const {
    const Index thread = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
    const Index at = by_vectors(thread), row = by_columns(at), image = by_rows(row);
    return {thread, image, row - image * rows, at - row * columns, thread * V - at * pixel};
  }
};

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

// Running maxima of V windows and, unless Indices is NoIndices, their taps. As in PyTorch: the
// first of equal elements wins, the last NaN wins.
template <typename T, int V, typename Indices>
struct Maxima {
  static constexpr bool kIndices = std::is_pointer_v<Indices>;
  using Value = std::conditional_t<kIndices, acc_t<T>, T>;

  Value value[V];
  int tap[V];

  __device__ Maxima() {  // of windows of padding alone
#pragma unroll
    for (int v = 0; v < V; ++v) {
      value[v] = static_cast<Value>(-INFINITY);
      tap[v] = kNoTap;
    }
  }

  __device__ void update(int v, T x, int at, bool first = false) {
    const auto y = static_cast<Value>(x);
    if constexpr (!kIndices) {
      value[v] = first ? y : max_nan(value[v], y);
    } else if (first || y > value[v] || y != y) {
      value[v] = y;
      tap[v] = at;
    }
  }

  __device__ void store(T* out, Indices indices, int64_t at) const {
    store_vector<V>(out + at, value);
    if constexpr (kIndices) {
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
  const auto at = s.template position<V>();
  if (at.thread >= s.threads) {
    return;
  }
  const Signed h = s.g.h, w = s.g.w, kernel_h = s.g.kernel_h, kernel_w = s.g.kernel_w,
               dilation_h = s.g.dilation_h, dilation_w = s.g.dilation_w;
  const Signed top =
      static_cast<Signed>(at.row) * static_cast<Signed>(s.g.stride_h) - s.g.padding_h;
  const Signed left =
      static_cast<Signed>(at.column) * static_cast<Signed>(s.g.stride_w) - s.g.padding_w;
  const Index row_step = w * s.pixel, image = at.image * (h * row_step) + at.channel;
  Maxima<T, V, Indices> maxima;
  const auto update = [&](Signed row, Signed column, Signed tap, bool first) {
    const auto values = load_vector<V>(x + (image + row * row_step + column * s.pixel));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      maxima.update(v, values.lane[v], static_cast<int>(tap), first);
    }
  };
  if constexpr (K > 0) {  // clamp coordinates: the edge pixel is in the window anyway
    Signed rows[K], columns[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      rows[i] = min(max(top + i, Signed{0}), h - 1);
      columns[i] = min(max(left + i, Signed{0}), w - 1);
    }
#pragma unroll
    for (int i = 0; i < K * K; ++i) {
      const Signed row = rows[i / K], column = columns[i % K];
      update(row, column, (row - top) * K + column - left, i == 0);
    }
  } else {
    bool first = true;
    for (Signed i = 0; i < kernel_h; ++i) {
      for (Signed j = 0; j < kernel_w; ++j) {
        const Signed row = top + i * dilation_h, column = left + j * dilation_w;
        if (row >= 0 && row < h && column >= 0 && column < w) {
          update(row, column, i * kernel_w + j, first);
          first = false;
        }
      }
    }
  }
  maxima.store(out, indices, at.thread * V);
}

// Backward: each pixel sums the gradients of the windows that contain it.
template <int V, typename T, typename I, typename Divider>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Params<Divider> s, const T* __restrict__ grad, const I* __restrict__ indices,
                    T* __restrict__ out) {
  using Index = typename Divider::Index;
  using Signed = typename Params<Divider>::Signed;
  const auto at = s.template position<V>();
  if (at.thread >= s.threads) {
    return;
  }
  const Signed out_h = s.g.out_h, out_w = s.g.out_w, kernel_w = s.g.kernel_w,
               stride_h = s.g.stride_h, stride_w = s.g.stride_w, dilation_h = s.g.dilation_h,
               dilation_w = s.g.dilation_w;
  const Signed y = at.row + s.g.padding_h, x = at.column + s.g.padding_w;  // padded coordinates
  const Signed span_h = (s.g.kernel_h - 1) * dilation_h, span_w = (kernel_w - 1) * dilation_w;
  const Signed first_row = y > span_h ? s.by_stride_h(y - span_h + stride_h - 1) : 0;
  const Signed first_column = x > span_w ? s.by_stride_w(x - span_w + stride_w - 1) : 0;
  const Index image = at.image * (out_h * out_w * s.pixel) + at.channel;

  acc_t<T> sums[V] = {};
  for (Signed row = first_row; row < out_h && row * stride_h <= y; ++row) {
    const Signed distance_h = y - row * stride_h;
    if (dilation_h > 1 && distance_h % dilation_h != 0) {
      continue;
    }
    const Signed i = dilation_h > 1 ? distance_h / dilation_h : distance_h;
    for (Signed column = first_column; column < out_w && column * stride_w <= x; ++column) {
      const Signed distance_w = x - column * stride_w;
      if (dilation_w > 1 && distance_w % dilation_w != 0) {
        continue;
      }
      const Signed j = dilation_w > 1 ? distance_w / dilation_w : distance_w;
      const Index from = image + (row * out_w + column) * s.pixel;
      const auto values = load_vector<V>(grad + from);
      const auto argmax = load_vector<V>(indices + from);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (argmax.lane[v] == static_cast<I>(i * kernel_w + j)) {
          sums[v] += static_cast<acc_t<T>>(values.lane[v]);
        }
      }
    }
  }
  store_vector<V>(out + at.thread * V, sums);
}

}  // namespace ops::max_pool2d
