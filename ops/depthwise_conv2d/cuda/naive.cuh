// naive: any geometry and size, in 64-bit arithmetic.
//
//      input  ┌─┬─┬─┐           output
//             ├─┼─┼─┤  ───────►  ┌─┐
//             └─┴─┴─┘            └─┘
//
//   block:   kNaiveThreads adjacent outputs
//   shared:  nothing
//   thread:  one output, tap by tap
//
// Weight gradient
//   block:   one tap (or the bias) of one channel
//   shared:  one sum per thread
//   thread:  every kNaiveThreads-th output; then a tree reduction in a fixed order
#pragma once

#include "core/cuda/common.cuh"
#include "depthwise_conv2d/op.h"

namespace ops::cuda {

constexpr int kNaiveThreads = 256;

// Coordinates of the element at memory index i of an image tensor.
struct Position {
  int64_t n, c, h, w;

  __device__ Position(const DepthwiseGeometry& g, int64_t i, int64_t height, int64_t width) {
    if (g.channels_last) {
      c = i % g.c, i /= g.c;
      w = i % width, i /= width;
      h = i % height, n = i / height;
    } else {
      w = i % width, i /= width;
      h = i % height, i /= height;
      c = i % g.c, n = i / g.c;
    }
  }
};

__device__ inline int64_t offset(const DepthwiseGeometry& g, int64_t n, int64_t c, int64_t h,
                                 int64_t w, int64_t height, int64_t width) {
  return g.channels_last ? ((n * height + h) * width + w) * g.c + c
                         : ((n * g.c + c) * height + h) * width + w;
}

template <typename T>
__global__ void __launch_bounds__(kNaiveThreads)
    naive_forward_kernel(DepthwiseGeometry g, const T* __restrict__ x, const T* __restrict__ weight,
                         const T* __restrict__ bias, T* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kNaiveThreads + threadIdx.x;
  if (i >= g.n * g.c * g.out_h * g.out_w) {
    return;
  }
  const Position at(g, i, g.out_h, g.out_w);
  acc_t<T> sum = bias ? static_cast<acc_t<T>>(bias[at.c]) : acc_t<T>(0);
  for (int64_t a = 0; a < g.kernel_h; ++a) {
    const int64_t h = at.h * g.stride_h - g.padding_h + a * g.dilation_h;
    if (h < 0 || h >= g.h) {
      continue;
    }
    for (int64_t b = 0; b < g.kernel_w; ++b) {
      const int64_t w = at.w * g.stride_w - g.padding_w + b * g.dilation_w;
      if (w >= 0 && w < g.w) {
        sum += static_cast<acc_t<T>>(weight[(at.c * g.kernel_h + a) * g.kernel_w + b]) *
               static_cast<acc_t<T>>(x[offset(g, at.n, at.c, h, w, g.h, g.w)]);
      }
    }
  }
  out[i] = static_cast<T>(sum);
}

template <typename T>
__global__ void __launch_bounds__(kNaiveThreads)
    naive_input_gradient_kernel(DepthwiseGeometry g, const T* __restrict__ grad,
                                const T* __restrict__ weight, T* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kNaiveThreads + threadIdx.x;
  if (i >= g.n * g.c * g.h * g.w) {
    return;
  }
  const Position at(g, i, g.h, g.w);
  acc_t<T> sum = 0;
  for (int64_t a = 0; a < g.kernel_h; ++a) {
    const int64_t h = at.h + g.padding_h - a * g.dilation_h;
    if (h < 0 || h % g.stride_h != 0 || h / g.stride_h >= g.out_h) {
      continue;
    }
    for (int64_t b = 0; b < g.kernel_w; ++b) {
      const int64_t w = at.w + g.padding_w - b * g.dilation_w;
      if (w >= 0 && w % g.stride_w == 0 && w / g.stride_w < g.out_w) {
        sum += static_cast<acc_t<T>>(weight[(at.c * g.kernel_h + a) * g.kernel_w + b]) *
               static_cast<acc_t<T>>(
                   grad[offset(g, at.n, at.c, h / g.stride_h, w / g.stride_w, g.out_h, g.out_w)]);
      }
    }
  }
  out[i] = static_cast<T>(sum);
}

// Grid: channels × (taps + 1); the last "tap" is the bias.
template <typename T>
__global__ void __launch_bounds__(kNaiveThreads)
    naive_weight_gradient_kernel(DepthwiseGeometry g, const T* __restrict__ grad,
                                 const T* __restrict__ x, T* __restrict__ grad_weight,
                                 T* __restrict__ grad_bias) {
  const int64_t taps = g.kernel_h * g.kernel_w;
  const int64_t c = blockIdx.x / (taps + 1), tap = blockIdx.x % (taps + 1);
  const bool for_bias = tap == taps;
  if (for_bias ? grad_bias == nullptr : grad_weight == nullptr) {
    return;
  }
  const int64_t a = tap / g.kernel_w, b = tap % g.kernel_w;
  acc_t<T> sum = 0;
  for (int64_t i = threadIdx.x; i < g.n * g.out_h * g.out_w; i += kNaiveThreads) {
    const int64_t ow = i % g.out_w, oh = i / g.out_w % g.out_h, n = i / g.out_w / g.out_h;
    const int64_t h = oh * g.stride_h - g.padding_h + a * g.dilation_h;
    const int64_t w = ow * g.stride_w - g.padding_w + b * g.dilation_w;
    const bool inside = h >= 0 && h < g.h && w >= 0 && w < g.w;
    if (for_bias || inside) {
      const auto value = static_cast<acc_t<T>>(grad[offset(g, n, c, oh, ow, g.out_h, g.out_w)]);
      sum += for_bias ? value : value * static_cast<acc_t<T>>(x[offset(g, n, c, h, w, g.h, g.w)]);
    }
  }
  __shared__ acc_t<T> sums[kNaiveThreads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kNaiveThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    (for_bias ? grad_bias[c] : grad_weight[c * taps + tap]) = static_cast<T>(sums[0]);
  }
}

}  // namespace ops::cuda
