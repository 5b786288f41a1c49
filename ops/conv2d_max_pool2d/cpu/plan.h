// Gradients of convolution and max pooling: layouts of the packed tensors.
//
// The gradient of the convolution's output has at most one non-zero element per pooling window. For
// each output channel, the kernels loop over these elements:
//
//     grad_weight[co]              += gradient · receptive field in the input
//     grad_input[receptive field]  += gradient · weight[co]
//
// A row of a receptive field, [kw][ci], is contiguous in the packed image [h][w][ci] and in the
// packed weight [co][kh][tap_row].
#pragma once

#include <vector>

#include "conv2d_max_pool2d/op.h"

namespace ops::cpu {

constexpr int64_t kMaxTapRow = 64;  // weights of a filter row: sums in registers

// A non-zero gradient, and the offset of its receptive field in the packed image.
struct Term {
  float factor;
  int32_t offset;
};

// A pixel of the pooled output.
struct PooledPixel {
  int64_t source;  // in a plane of grad_output
  int32_t offset;  // receptive field of the first pixel of its window, in the packed image
};

struct GradientPlan : ConvPool {
  ImageStrides image, pooled;  // strides of input and grad_output
  int64_t row, padding;        // packed image: size of a row, offset of the first pixel
  int64_t tap_row;             // packed weight: size of a row, whole vectors
  std::vector<PooledPixel> windows;
  std::vector<int32_t> taps;  // offsets of a pooling window's taps in the packed image; -1: no tap
  const float *grad, *x, *weight;
  const uint8_t* indices;
  float* grad_input;  // null: not needed

  GradientPlan(const ConvPool& g, int64_t lanes)
      : ConvPool(g),
        image(image_strides(g.channels_last, g.in_c, g.conv.h, g.conv.w)),
        pooled(image_strides(g.channels_last, g.out_c, g.out_h, g.out_w)),
        row((g.conv.w + 2 * g.conv.padding_w) * g.in_c),
        padding(g.conv.padding_h * row + g.conv.padding_w * g.in_c),
        tap_row((g.conv.kernel_w * g.in_c + lanes - 1) / lanes * lanes),
        taps(kByteTaps, -1) {
    const int64_t step_h = conv.stride_h * row, step_w = conv.stride_w * in_c;
    // Columns first: adjacent terms then overlap in the same vectors of grad_input, or not at all.
    for (int64_t w = 0; w < out_w; ++w) {
      for (int64_t h = 0; h < out_h; ++h) {
        windows.push_back({h * pooled.h + w * pooled.w,
                           static_cast<int32_t>(h * pool_h * step_h + w * pool_w * step_w)});
      }
    }
    for (int64_t tap = 0; tap < pool_h * pool_w; ++tap) {
      taps[tap] = tap / pool_w * step_h + tap % pool_w * step_w;
    }
  }

  int64_t filter() const { return conv.kernel_h * tap_row; }
  int64_t packed_size() const {  // the last row is read in whole vectors
    return (conv.h + 2 * conv.padding_h) * row + tap_row;
  }
};

}  // namespace ops::cpu
