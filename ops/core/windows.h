// Geometry of sliding-window operators (convolution, pooling, involution).
#pragma once

#include "core/layout.h"

namespace ops {

struct Windows {
  int64_t h, w;          // input
  int64_t out_h, out_w;  // output
  int64_t kernel_h, kernel_w;
  int64_t stride_h, stride_w;
  int64_t padding_h, padding_w;
  int64_t dilation_h, dilation_w;
};

// Gradients of a convolution to compute; nullptr: not requested, or empty.
template <typename T>
struct Gradients {
  T* input;
  T* weight;
  T* bias;
};

struct ImageStrides {
  int64_t n, c, h, w;
};

inline ImageStrides image_strides(bool channels_last, int64_t c, int64_t h, int64_t w) {
  return channels_last ? ImageStrides{c * h * w, 1, c * w, c}
                       : ImageStrides{c * h * w, h * w, w, 1};
}

// User arguments: each two integers, vertical and horizontal.
struct Spacing {
  const std::vector<int64_t>&stride, &padding, &dilation;
};

constexpr int64_t kMaxSpacing = int64_t{1} << 31;  // avoids overflow in sums of sizes

inline void check_value(const char* op, const char* name, int64_t value, int64_t minimum) {
  check(value >= minimum, op, ": ", name, " must be at least ", minimum, ", got ", value);
  check(value <= kMaxSpacing, op, ": ", name, " must be at most ", kMaxSpacing, ", got ", value);
}

inline void check_pair(const char* op, const char* name, const std::vector<int64_t>& values,
                       int64_t minimum) {
  check(values.size() == 2 && values[0] >= minimum && values[1] >= minimum, op, ": ", name,
        " must be two integers, at least ", minimum, ", got ", list{values});
  check(values[0] <= kMaxSpacing && values[1] <= kMaxSpacing, op, ": ", name, " must be at most ",
        kMaxSpacing, ", got ", list{values});
}

// Check the arguments and compute the output size for an h × w image. As in torch, with ceil_mode
// the last window may extend beyond the padded image, but must not start in the right padding.
inline Windows windows(const char* op, int64_t h, int64_t w, int64_t kernel_h, int64_t kernel_w,
                       const Spacing& spacing, bool ceil_mode = false) {
  const auto& [stride, padding, dilation] = spacing;
  check_pair(op, "stride", stride, 1);
  check_pair(op, "padding", padding, 0);
  check_pair(op, "dilation", dilation, 1);
  const auto output_size = [&](char side, int64_t size, int64_t kernel, int64_t s, int64_t p,
                               int64_t d) {
    const int64_t span = d * (kernel - 1) + 1;
    const int64_t room = size + 2 * p - span + (ceil_mode ? s - 1 : 0);
    check(room >= 0, op, ": the dilated kernel must fit into the padded input; in ", side,
          " the kernel spans ", span, ", the padded input ", size + 2 * p);
    const int64_t last = room / s;
    return ceil_mode && last * s >= size + p ? last : last + 1;
  };
  const int64_t out_h = output_size('H', h, kernel_h, stride[0], padding[0], dilation[0]);
  const int64_t out_w = output_size('W', w, kernel_w, stride[1], padding[1], dilation[1]);
  return {h,         w,         out_h,      out_w,      kernel_h,    kernel_w,
          stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1]};
}

}  // namespace ops
