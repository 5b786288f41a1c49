// general: involution of any kernel, stride, dilation, dtype and size, in 64-bit indices.
//
//      weight of (group, tap, pixel)        source window        sums
//      ┌───┐  loaded once for 8 channels    ┌───────────┐       ┌────────────┐
//      │ w │ ─────────────────────────────► │ × 8 chan. │ ────► │ 8 channels │ ──► out
//      └───┘  for every tap                 └───────────┘       └────────────┘
//
//   block:   256 adjacent (image, group, row, column) pixels
//   shared:  nothing
//   thread:  one pixel of a group, 8 channels at a time; weight gradient: one tap of one pixel,
//            summed over the channels of the group
#pragma once

#include "core/axis.h"
#include "core/cuda/common.cuh"
#include "involution2d/op.h"

namespace ops::involution2d {

using namespace cuda;

constexpr int kGeneralThreads = 256;
constexpr int kGeneralChannels = 8;  // in registers at a time

// Image, group, tap (weight gradient only) and pixel of the thread, the column fastest.
struct GeneralIndex {
  int64_t n, group, tap, h, w;

  __device__ GeneralIndex(const Geometry& g, int64_t taps, int64_t height, int64_t width) {
    int64_t i = static_cast<int64_t>(blockIdx.x) * kGeneralThreads + threadIdx.x;
    w = i % width, i /= width;
    h = i % height, i /= height;
    tap = i % taps, i /= taps;
    group = i % g.groups, n = i / g.groups;
  }
};

__device__ inline int64_t offset(const ImageStrides& s, int64_t n, int64_t c, int64_t h,
                                 int64_t w) {
  return n * s.n + c * s.c + h * s.h + w * s.w;
}

// Forward (source: x) or, with kTransposed, input gradient (source: grad_output).
template <bool kTransposed, typename T>
__global__ void __launch_bounds__(kGeneralThreads, 2)
    involve_general_kernel(Geometry g, ImageStrides source_strides, ImageStrides weight_strides,
                           ImageStrides out_strides, const T* __restrict__ source,
                           const T* __restrict__ weight, T* __restrict__ out) {
  const Axis vertical = vertical_axis(g, kTransposed), horizontal = horizontal_axis(g, kTransposed);
  const GeneralIndex at(g, 1, vertical.out_size, horizontal.out_size);
  if (at.n >= g.n) {
    return;
  }
  const int64_t channels = g.group_channels();
  for (int64_t first = 0; first < channels; first += kGeneralChannels) {
    const int64_t channel = at.group * channels + first;
    acc_t<T> sum[kGeneralChannels] = {};
    for (int64_t a = 0; a < g.kernel_h; ++a) {
      const int64_t h = vertical.source(at.h, a);
      for (int64_t b = 0; b < g.kernel_w; ++b) {
        const int64_t w = horizontal.source(at.w, b);
        const bool inside = h >= 0 && w >= 0;
        if (kTransposed && !inside) {
          continue;
        }
        const int64_t tap = (at.group * g.kernel_h + a) * g.kernel_w + b;
        const auto tap_weight = static_cast<acc_t<T>>(
            kTransposed ? weight[offset(weight_strides, at.n, tap, h, w)]
                        : weight[offset(weight_strides, at.n, tap, at.h, at.w)]);
#pragma unroll
        for (int c = 0; c < kGeneralChannels; ++c) {
          if (first + c < channels) {
            sum[c] +=
                tap_weight * (inside ? static_cast<acc_t<T>>(
                                           source[offset(source_strides, at.n, channel + c, h, w)])
                                     : acc_t<T>(0));
          }
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kGeneralChannels; ++c) {
      if (first + c < channels) {
        out[offset(out_strides, at.n, channel + c, at.h, at.w)] = static_cast<T>(sum[c]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kGeneralThreads)
    involve_general_weight_kernel(Geometry g, ImageStrides x_strides, ImageStrides weight_strides,
                                  ImageStrides grad_strides, const T* __restrict__ x,
                                  const T* __restrict__ grad, T* __restrict__ grad_weight) {
  const GeneralIndex at(g, g.taps(), g.out_h, g.out_w);
  if (at.n >= g.n) {
    return;
  }
  const int64_t h = vertical_axis(g, false).source(at.h, at.tap / g.kernel_w);
  const int64_t w = horizontal_axis(g, false).source(at.w, at.tap % g.kernel_w);
  const bool inside = h >= 0 && w >= 0;
  const int64_t channels = g.group_channels();
  acc_t<T> sum = 0;
  for (int64_t c = at.group * channels; c < (at.group + 1) * channels; ++c) {
    const auto value =
        inside ? static_cast<acc_t<T>>(x[offset(x_strides, at.n, c, h, w)]) : acc_t<T>(0);
    sum += static_cast<acc_t<T>>(grad[offset(grad_strides, at.n, c, at.h, at.w)]) * value;
  }
  grad_weight[offset(weight_strides, at.n, at.group * g.taps() + at.tap, at.h, at.w)] =
      static_cast<T>(sum);
}

}  // namespace ops::involution2d
