// Windows that slide over images: what operators like convolution share.
#pragma once

#include "core/layout.h"

namespace ops {

struct Windows {
  int64_t h, w;          // input
  int64_t out_h, out_w;  // output: the places of the window
  int64_t kernel_h, kernel_w;
  int64_t stride_h, stride_w;
  int64_t padding_h, padding_w;
  int64_t dilation_h, dilation_w;
};

// Distances between elements of an image tensor.
struct ImageStrides {
  int64_t n, c, h, w;
};

inline ImageStrides image_strides(bool channels_last, int64_t c, int64_t h, int64_t w) {
  return channels_last ? ImageStrides{c * h * w, 1, c * w, c}
                       : ImageStrides{c * h * w, h * w, w, 1};
}

inline MemoryFormat image_format(bool channels_last) {
  return channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
}

inline Tensor empty_image(const Tensor& like, int64_t n, int64_t c, int64_t h, int64_t w,
                          bool channels_last) {
  return empty(like, {n, c, h, w}, image_format(channels_last));
}

inline Tensor in_format(const Tensor& x, bool channels_last) {
  return as_contiguous(x, image_format(channels_last));
}

// How windows lie, as users say it: each is two integers, vertical and horizontal.
struct Spacing {
  const std::vector<int64_t>&stride, &padding, &dilation;
};

inline void check_pair(const char* op, const char* name, const std::vector<int64_t>& values,
                       int64_t least) {
  constexpr int64_t kMost = int64_t{1} << 31;  // beyond it sums of sizes could overflow
  check(values.size() == 2 && values[0] >= least && values[1] >= least, op, ": ", name,
        " must be two integers, at least ", least, ", got ", list{values});
  check(values[0] <= kMost && values[1] <= kMost, op, ": ", name, " must be at most ", kMost,
        ", got ", list{values});
}

// The places of a kernel in an image of h by w pixels. With ceil_mode the last ones may reach over
// the padded image's end, but begin before the padding there.
inline Windows windows(const char* op, int64_t h, int64_t w, int64_t kernel_h, int64_t kernel_w,
                       const Spacing& spacing, bool ceil_mode = false) {
  const auto& [stride, padding, dilation] = spacing;
  check_pair(op, "stride", stride, 1);
  check_pair(op, "padding", padding, 0);
  check_pair(op, "dilation", dilation, 1);
  const auto places = [&](char side, int64_t size, int64_t kernel, int64_t s, int64_t p,
                          int64_t d) {
    const int64_t span = d * (kernel - 1) + 1;
    const int64_t room = size + 2 * p - span + (ceil_mode ? s - 1 : 0);
    check(room >= 0, op, ": the dilated kernel must fit into the padded input; in ", side,
          " the kernel spans ", span, ", the padded input ", size + 2 * p);
    const int64_t last = room / s;
    return ceil_mode && last * s >= size + p ? last : last + 1;
  };
  return {h,
          w,
          places('H', h, kernel_h, stride[0], padding[0], dilation[0]),
          places('W', w, kernel_w, stride[1], padding[1], dilation[1]),
          kernel_h,
          kernel_w,
          stride[0],
          stride[1],
          padding[0],
          padding[1],
          dilation[0],
          dilation[1]};
}

}  // namespace ops
