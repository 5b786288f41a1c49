// Tuned geometries as compile-time axes (core/axis.h), and loops over the taps of a register tile.
#pragma once

#include "core/axis.h"
#include "core/cuda/common.cuh"
#include "depthwise_conv2d/op.h"

namespace ops::depthwise_conv2d {

using namespace ops::cuda;

// Return f(ForwardAxis<K, S, D>{}) for the tuned geometries, else false.
template <typename F>
bool dispatch_forward_axis(const Geometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != g.stride_w || g.dilation_h != g.dilation_w) {
    return false;
  }
  const auto is = [&](int64_t kernel, int64_t stride, int64_t dilation) {
    return g.kernel_h == kernel && g.stride_h == stride && g.dilation_h == dilation;
  };
  if (is(3, 1, 1)) return f(ForwardAxis<3, 1, 1>{});
  if (is(5, 1, 1)) return f(ForwardAxis<5, 1, 1>{});
  if (is(7, 1, 1)) return f(ForwardAxis<7, 1, 1>{});
  if (is(3, 1, 2)) return f(ForwardAxis<3, 1, 2>{});
  if (is(3, 2, 1)) return f(ForwardAxis<3, 2, 1>{});
  if (is(5, 2, 1)) return f(ForwardAxis<5, 2, 1>{});
  if (is(7, 2, 1)) return f(ForwardAxis<7, 2, 1>{});
  return false;
}

// Size of the images whose outputs one thread computes.
constexpr int kWholeSize = 7;

// Return f(WholeAxis<K, kWholeSize>{}) for images of that size with "same" padding, else false.
template <typename F>
bool dispatch_whole_axis(const Geometry& g, const F& f) {
  if (g.h != kWholeSize || g.w != kWholeSize || g.padding_h * 2 != g.kernel_h - 1 ||
      g.padding_w * 2 != g.kernel_w - 1) {
    return false;
  }
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kStride == 1 && Axis::kDilation == 1) {
      return f(WholeAxis<Axis::kTaps, kWholeSize>{});
    }
    return false;
  });
}

// The same with TransposedAxis<K, padding parity>{} for a transposed convolution.
template <typename F>
bool dispatch_axis(const Geometry& g, bool transposed, const F& f) {
  if (!transposed) {
    return dispatch_forward_axis(g, f);
  }
  if (g.kernel_h != g.kernel_w || g.stride_h != 2 || g.stride_w != 2 || g.dilation_h != 1 ||
      g.dilation_w != 1 || g.padding_h % 2 != g.padding_w % 2) {
    return false;
  }
  const bool odd = g.padding_h % 2;
  switch (g.kernel_h) {
    case 3: return odd ? f(TransposedAxis<3, 1>{}) : f(TransposedAxis<3, 0>{});
    case 5: return odd ? f(TransposedAxis<5, 1>{}) : f(TransposedAxis<5, 0>{});
    case 7: return odd ? f(TransposedAxis<7, 1>{}) : f(TransposedAxis<7, 0>{});
    default: return false;
  }
}

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

}  // namespace ops::depthwise_conv2d
