// CUDA max pooling. Forward stores the maximum and its tap (row-major position in the window).
//
//   max_pool_kernel                               max_pool_2x2_kernel: NCHW, stride 2
//   ┌───┬───┬───┐   V channels (NHWC) or          ┌──┬──┬──┬──┐ one vector of 2 V pixels per row
//   │   │   │   │   1 channel (NCHW) of           │0 │1 │0 │1 │
//   ├───┼───┼───┤   each tap: value, tap          ├──┼──┼──┼──┤ ──► V maxima, V taps
//   │   │   │   │ ─────────────► max, argmax      │2 │3 │2 │3 │
//   └───┴───┴───┘                                 └──┴──┴──┴──┘
//
//   block:   256 adjacent vectors of outputs; backward: of inputs
//   shared:  nothing; overlapping windows hit the L1 cache
//   thread:  V running maxima and their taps; backward: V sums, gathered without atomics from the
//            windows whose maximum is the thread's pixel
#pragma once

#include "core/cuda/divide.cuh"
#include "max_pool2d/op.h"

namespace ops::cuda {

constexpr int kPoolThreads = 256;

// Kernel parameters. Divider is FastDivide (32-bit indices) or Divide (64-bit).
template <typename Divider>
struct PoolParams {
  using Index = typename Divider::Index;
  using Signed = std::make_signed_t<Index>;

  Signed h, w, out_h, out_w;
  Signed kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  Signed pixel;  // elements per pixel: C (channels-last) or 1
  Index threads;
  Divider by_vectors, by_width, by_height, by_stride_h, by_stride_w;

  // One thread per vector of `width` elements of an image of rows × columns pixels.
  PoolParams(const MaxPoolGeometry& g, int64_t rows, int64_t columns, int64_t width)
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
struct PoolPosition {
  Index image, row, column, channel;
};

template <int V, typename Divider, typename Index = typename Divider::Index>
__device__ PoolPosition<Index> position_of(const PoolParams<Divider>& s, Index thread, Index rows,
                                           Index columns) {
  const Index pixel = s.by_vectors(thread), row = s.by_width(pixel), image = s.by_height(row);
  return {image, row - image * rows, pixel - row * columns,
          thread * V - pixel * static_cast<Index>(s.pixel)};
}

template <typename Index>
__device__ Index thread_index() {
  return static_cast<Index>(blockIdx.x) * kPoolThreads + threadIdx.x;
}

// Running maximum and its tap. As in PyTorch: the first of equal elements wins, the last NaN wins.
template <typename T, typename I>
struct RunningMax {
  acc_t<T> value;
  I tap;

  __device__ void update(T x, I at, bool first = false) {
    const auto v = static_cast<acc_t<T>>(x);
    if (first || v > value || v != v) {
      value = v;
      tap = at;
    }
  }
};

// Forward. K: compile-time K×K window without dilation; 0: any window.
template <int K, int V, typename T, typename I, typename Divider>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_kernel(PoolParams<Divider> s, const T* __restrict__ x, T* __restrict__ out,
                    I* __restrict__ indices) {
  using Index = typename Divider::Index;
  using Signed = typename PoolParams<Divider>::Signed;
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const auto at =
      position_of<V>(s, thread, static_cast<Index>(s.out_h), static_cast<Index>(s.out_w));
  const Signed top = static_cast<Signed>(at.row) * s.stride_h - s.padding_h;
  const Signed left = static_cast<Signed>(at.column) * s.stride_w - s.padding_w;
  const T* image = x + at.image * (s.h * s.w * s.pixel) + at.channel;
  RunningMax<T, I> running_max[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    running_max[v] = {-INFINITY, 0};
  }
  const auto update = [&](Signed row, Signed column, Signed tap, bool first) {
    const auto values = load_vector<V>(image + (row * s.w + column) * s.pixel);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      running_max[v].update(values.lane[v], static_cast<I>(tap), first);
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
  Vector<T, V> values;
  Vector<I, V> argmax;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    values.lane[v] = static_cast<T>(running_max[v].value);
    argmax.lane[v] = running_max[v].tap;
  }
  reinterpret_cast<Vector<T, V>*>(out)[thread] = values;
  reinterpret_cast<Vector<I, V>*>(indices)[thread] = argmax;
}

// Backward: each pixel sums the gradients of the windows that contain it.
template <int V, typename T, typename I, typename Divider>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_backward_kernel(PoolParams<Divider> s, const T* __restrict__ grad,
                             const I* __restrict__ indices, T* __restrict__ out) {
  using Index = typename Divider::Index;
  using Signed = typename PoolParams<Divider>::Signed;
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

// Forward, 2×2 windows with stride 2 without padding, NCHW: V outputs per thread.
template <int V, typename T, typename Divider>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_2x2_kernel(PoolParams<Divider> s, const T* __restrict__ x, T* __restrict__ out,
                        uint8_t* __restrict__ indices) {
  using Index = typename Divider::Index;
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const Index row = s.by_width(thread), image = s.by_height(row);
  const Index column = thread - row * (s.out_w / V);
  const T* from = x + (image * s.h + 2 * (row - image * s.out_h)) * s.w + column * 2 * V;
  const auto above = load_vector<2 * V>(from), below = load_vector<2 * V>(from + s.w);
  Vector<T, V> values;
  Vector<uint8_t, V> argmax;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    RunningMax<T, uint8_t> running_max{static_cast<acc_t<T>>(above.lane[2 * v]), 0};
    running_max.update(above.lane[2 * v + 1], 1);
    running_max.update(below.lane[2 * v], 2);
    running_max.update(below.lane[2 * v + 1], 3);
    values.lane[v] = static_cast<T>(running_max.value);
    argmax.lane[v] = running_max.tap;
  }
  reinterpret_cast<Vector<T, V>*>(out)[thread] = values;
  reinterpret_cast<Vector<uint8_t, V>*>(indices)[thread] = argmax;
}

// Backward of max_pool_2x2_kernel; the last row of an odd height is in no window and gets zeros.
template <int V, typename T, typename Divider>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_2x2_backward_kernel(PoolParams<Divider> s, const T* __restrict__ grad,
                                 const uint8_t* __restrict__ indices, T* __restrict__ out) {
  using Index = typename Divider::Index;
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const Index rows = (s.h + 1) / 2, columns = s.out_w / V;
  const Index row = s.by_width(thread), image = s.by_height(row), out_row = row - image * rows;
  const Index column = thread - row * columns;
  Vector<T, 2 * V> above{}, below{};
  if (out_row < s.out_h) {
    const Index from = (image * s.out_h + out_row) * columns + column;
    const auto values = load_vector<V>(grad + from * V);
    const auto argmax = reinterpret_cast<const Vector<uint8_t, V>*>(indices)[from];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const T zero = static_cast<T>(0), value = values.lane[v];
      const int tap = argmax.lane[v];
      above.lane[2 * v] = tap == 0 ? value : zero;
      above.lane[2 * v + 1] = tap == 1 ? value : zero;
      below.lane[2 * v] = tap == 2 ? value : zero;
      below.lane[2 * v + 1] = tap == 3 ? value : zero;
    }
  }
  T* to = out + (image * s.h + 2 * out_row) * s.w + column * 2 * V;
  *reinterpret_cast<Vector<T, 2 * V>*>(to) = above;
  if (2 * out_row + 1 < s.h) {
    *reinterpret_cast<Vector<T, 2 * V>*>(to + s.w) = below;
  }
}

}  // namespace ops::cuda
