// Index maps of one axis (vertical or horizontal) of a sliding-window operator.
#pragma once

#include <algorithm>

#include "core/windows.h"

namespace ops::cpu {

// Maps (output, tap) to a source position. Forward: source = input, out = output. Input gradient
// (`transposed`): source = grad_output, out = grad_input.
struct Axis {
  bool transposed;
  int64_t source_size, out_size, taps, stride, padding, dilation;

  Axis(bool transposed, int64_t input_size, int64_t output_size, int64_t taps, int64_t stride,
       int64_t padding, int64_t dilation)
      : transposed(transposed),
        source_size(transposed ? output_size : input_size),
        out_size(transposed ? input_size : output_size),
        taps(taps),
        stride(stride),
        padding(padding),
        dilation(dilation) {}

  // Return the source position that tap `tap` of output `out` reads, or −1 for padding.
  int64_t source(int64_t out, int64_t tap) const {
    int64_t at =
        transposed ? out + padding - tap * dilation : out * stride - padding + tap * dilation;
    if (transposed) {
      at = at % stride == 0 ? at / stride : -1;
    }
    return at >= 0 && at < source_size ? at : -1;
  }

  // Return the maximum distance from the first to the last source of an output, plus 1.
  int64_t span() const {
    const int64_t distance = (taps - 1) * dilation;
    return std::min(source_size, (transposed ? distance / stride : distance) + 1);
  }
};

inline Axis vertical_axis(const Windows& g, bool transposed) {
  return {transposed, g.h, g.out_h, g.kernel_h, g.stride_h, g.padding_h, g.dilation_h};
}

inline Axis horizontal_axis(const Windows& g, bool transposed) {
  return {transposed, g.w, g.out_w, g.kernel_w, g.stride_w, g.padding_w, g.dilation_w};
}

}  // namespace ops::cpu
