// CUDA max pooling. Forward stores the maximum and its tap (row-major position in the window).
//
//   max_pool_kernel                               max_pool_stride_2_kernel<2>: NCHW
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
    running_max[v] = {-INFINITY, static_cast<I>(kNoTap)};
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

// Backward, 3×3 windows with stride 2, padding 0 or 1, NCHW: 2 rows × 2 V columns per thread.
//
//      padded column   2c   2c+1   2c+2   2c+3        a column is in one window, as tap 1, if its
//      window c         0     1      2                padded number is odd, otherwise in two, as
//      window c+1                    0      1  …      tap 2 and tap 0; rows likewise
//
// S: elements per store, 2 V, or 1 for an odd width.
template <int S, typename T, typename Divider>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_3x3_backward_kernel(PoolParams<Divider> s, const T* __restrict__ grad,
                                 const uint8_t* __restrict__ indices, T* __restrict__ out) {
  using Index = typename Divider::Index;
  using Signed = typename PoolParams<Divider>::Signed;
  using Acc = acc_t<T>;
  constexpr int V = S == 1 ? 1 : S / 2, kOutside = 255;  // equals no tap
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const Signed rows = (s.h + 1) / 2, columns = (s.w + 2 * V - 1) / (2 * V);
  const Signed line = s.by_width(thread), image = s.by_height(line);
  const Signed row = line - image * rows;
  const Signed column = (static_cast<Signed>(thread) - line * columns) * V;
  const bool odd_first_h = s.padding_h == 1, odd_first_w = s.padding_w == 1;
  const Signed top = row - 1 + s.padding_h, left = column - 1 + s.padding_w;
  Acc even_row[2 * V] = {}, odd_row[2 * V] = {};  // [2 j]: even column, [2 j + 1]: odd column
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const bool row_inside = top + a >= 0 && top + a < s.out_h;
    const Index from = (image * s.out_h + top + a) * s.out_w;
    const int even_tap = a == 0 ? 6 : 0, odd_tap = odd_first_h == (a == 0) ? 3 : kOutside + 1;
#pragma unroll
    for (int j = 0; j <= V; ++j) {
      const bool inside = row_inside && left + j >= 0 && left + j < s.out_w;
      const Acc value = inside ? static_cast<Acc>(grad[from + left + j]) : Acc(0);
      const int tap = inside ? indices[from + left + j] : kOutside;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int pair = j - b;
        if (pair >= 0 && pair < V) {
          const bool has_odd = odd_first_w == (b == 0);
          const int even_column = b == 0 ? 2 : 0;
          even_row[2 * pair] += tap == even_tap + even_column ? value : Acc(0);
          odd_row[2 * pair] += tap == odd_tap + even_column ? value : Acc(0);
          even_row[2 * pair + 1] += has_odd && tap == even_tap + 1 ? value : Acc(0);
          odd_row[2 * pair + 1] += has_odd && tap == odd_tap + 1 ? value : Acc(0);
        }
      }
    }
  }
  T* to = out + (static_cast<Index>(image) * s.h + 2 * row) * s.w + 2 * column;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * row + i < s.h) {
      Vector<T, 2 * V> result;
#pragma unroll
      for (int j = 0; j < 2 * V; ++j) {
        const int even = j / 2 * 2, odd = even + 1;
        const int same = j, other = j == even ? odd : even;
        const Acc first = odd_first_w ? odd_row[other] : odd_row[same];
        const Acc second = odd_first_w ? even_row[other] : even_row[same];
        result.lane[j] = static_cast<T>(odd_first_h == (i == 0) ? first : second);
      }
      if constexpr (S == 1) {
        to[0] = result.lane[0];
        if (2 * column + 1 < s.w) {
          to[1] = result.lane[1];
        }
      } else {
        *reinterpret_cast<Vector<T, S>*>(to) = result;
      }
      to += s.w;
    }
  }
}

// Forward, K×K windows with stride 2, NCHW, even width: V outputs per thread. Padding: 0 for 2×2, 1
// for 3×3.
//
//      column        2c−1   2c   2c+1   2c+2   2c+3      of each input row a thread loads a vector
//      3×3, window c   0     1     2                     of 2 V and, for 3×3, the element before;
//      window c+1                  0      1      2  …    coordinates are clamped as in
//      2×2, window c         0     1                     max_pool_kernel
//
template <int K, int V, typename T, typename Divider>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool_stride_2_kernel(PoolParams<Divider> s, const T* __restrict__ x, T* __restrict__ out,
                             uint8_t* __restrict__ indices) {
  using Index = typename Divider::Index;
  using Signed = typename PoolParams<Divider>::Signed;
  constexpr int kPadding = K - 2;
  const Index thread = thread_index<Index>();
  if (thread >= s.threads) {
    return;
  }
  const Index line = s.by_width(thread), image = s.by_height(line);
  const Signed top = 2 * static_cast<Signed>(line - image * s.out_h) - kPadding;
  const Index column = (thread - line * (s.out_w / V)) * 2 * V;
  Vector<T, 2 * V> vectors[K];
  T left[K];
  int taps[K];  // of the rows' first elements
#pragma unroll
  for (int i = 0; i < K; ++i) {
    const Signed row = kPadding > 0 ? min(max(top + i, Signed{0}), s.h - 1) : top + i;
    const T* from = x + (image * s.h + row) * s.w + column;
    vectors[i] = load_vector<2 * V>(from);
    left[i] = from[kPadding > 0 && column > 0 ? -1 : 0];
    taps[i] = K * (row - top);
  }
  Vector<T, V> values;
  Vector<uint8_t, V> argmax;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    RunningMax<T, int> running_max{};
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const auto& lane = vectors[i].lane;
      if constexpr (kPadding > 0) {
        const int outside = v == 0 && column == 0;
        running_max.update(v == 0 ? left[i] : lane[2 * v - 1], taps[i] + outside, i == 0);
      }
      running_max.update(lane[2 * v], taps[i] + kPadding, kPadding == 0 && i == 0);
      running_max.update(lane[2 * v + 1], taps[i] + kPadding + 1);
    }
    values.lane[v] = static_cast<T>(running_max.value);
    argmax.lane[v] = static_cast<uint8_t>(running_max.tap);
  }
  reinterpret_cast<Vector<T, V>*>(out)[thread] = values;
  reinterpret_cast<Vector<uint8_t, V>*>(indices)[thread] = argmax;
}

// Backward, 2×2 windows with stride 2 without padding, NCHW: V outputs per thread. The last row of
// an odd height is in no window and gets zeros.
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
