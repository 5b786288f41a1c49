// One axis of windows over an image; see windows.h.
#pragma once

#include <algorithm>

#include "windows.h"

namespace ops::cpu {

// Which outputs and sources an axis of a correlation has, and how they meet.
struct Axis {
  bool transposed;  // the input gradient
  int64_t source_size, out_size, taps, stride, padding, dilation;

  // The source position that an output takes at a tap, −1 if none.
  int64_t source(int64_t out, int64_t tap) const {
    int64_t at =
        transposed ? out + padding - tap * dilation : out * stride - padding + tap * dilation;
    if (transposed) {
      at = at % stride == 0 ? at / stride : -1;
    }
    return at >= 0 && at < source_size ? at : -1;
  }

  // Source positions from the first that an output takes to the last, at most.
  int64_t span() const {
    const int64_t distance = (taps - 1) * dilation;
    return std::min(source_size, (transposed ? distance / stride : distance) + 1);
  }
};

inline Axis vertical_axis(const Windows& g, bool transposed) {
  return {transposed,
          transposed ? g.out_h : g.h,
          transposed ? g.h : g.out_h,
          g.kernel_h,
          g.stride_h,
          g.padding_h,
          g.dilation_h};
}

inline Axis horizontal_axis(const Windows& g, bool transposed) {
  return {transposed,
          transposed ? g.out_w : g.w,
          transposed ? g.w : g.out_w,
          g.kernel_w,
          g.stride_w,
          g.padding_w,
          g.dilation_w};
}

}  // namespace ops::cpu
