// Maps of one axis (vertical or horizontal) of a sliding-window operator: (output, tap) to source,
// the element that the tap reads. Forward: from input to output. Input gradient, `transposed`: from
// grad_output to grad_input.
#pragma once

#include <algorithm>

#include "core/windows.h"

namespace ops {

// One axis of a convolution with K taps, stride S and dilation D: maps between a tile of adjacent
// outputs and its window of inputs.
template <int K, int S, int D>
struct ForwardAxis {
  static constexpr int kTaps = K, kStride = S, kDilation = D;
  static constexpr bool kTransposed = false, kWhole = false;

  // Return the number of sources that `outputs` adjacent outputs read: their window.
  static constexpr int inputs(int outputs) { return (outputs - 1) * S + (K - 1) * D + 1; }
  // Return the distance between the windows of adjacent tiles of `outputs` outputs.
  static constexpr int step(int outputs) { return outputs * S; }

  // Return the tap with which output o reads input i of the window, or −1.
  static constexpr int tap(int o, int i) {
    const int distance = i - o * S;
    return distance >= 0 && distance % D == 0 && distance / D < K ? distance / D : -1;
  }

  // Return the image coordinate of the first window.
  static constexpr int start(int padding) { return -padding; }
};

// The same maps for all outputs of an image of kSize pixels with "same" padding and stride 1: the
// window is the image, without its padding.
template <int K, int kSize>
struct WholeAxis : ForwardAxis<K, 1, 1> {
  static constexpr bool kWhole = true;
  static constexpr int inputs(int) { return kSize; }
  static constexpr int tap(int o, int i) { return ForwardAxis<K, 1, 1>::tap(o, i + K / 2); }
  static constexpr int start(int) { return 0; }
};

// The same maps for the input gradient with stride S, for numbers of outputs that are multiples of
// S. (With stride 1 it is a ForwardAxis with a flipped filter.)
template <int K, int kPaddingParity, int S = 2>
struct TransposedAxis {
  static_assert((K - 1) % S == 0,
                "the window's first input must not depend on the output's parity");
  static constexpr int kTaps = K, kStride = S, kDilation = 1;
  static constexpr bool kTransposed = true, kWhole = false;

  static constexpr int inputs(int outputs) {
    return (outputs - 1 + kPaddingParity) / S + (K - 1) / S + 1;
  }
  static constexpr int step(int outputs) { return outputs / S; }
  static constexpr int tap(int o, int i) {
    const int t = o + kPaddingParity + (K - 1) - S * i;
    return t >= 0 && t < K ? t : -1;
  }
  static constexpr int start(int padding) { return padding / S - (K - 1) / S; }
};

// The map with run-time taps, stride, padding and dilation.
struct Axis {
  bool transposed;
  int64_t source_size, out_size, taps, stride, padding, dilation;

  OPS_DEVICE Axis(bool transposed, int64_t input_size, int64_t output_size, int64_t taps,
                  int64_t stride, int64_t padding, int64_t dilation)
      : transposed(transposed),
        source_size(transposed ? output_size : input_size),
        out_size(transposed ? input_size : output_size),
        taps(taps),
        stride(stride),
        padding(padding),
        dilation(dilation) {}

  // Return the source position that tap `tap` of output `out` reads, or −1 for padding.
  OPS_DEVICE int64_t source(int64_t out, int64_t tap) const {
    int64_t at =
        transposed ? out + padding - tap * dilation : out * stride - padding + tap * dilation;
    if (transposed) {
      at = at % stride == 0 ? at / stride : -1;
    }
    return at >= 0 && at < source_size ? at : -1;
  }

  // Phase f of the image (x or its gradient): the pixels f, f + stride, … Each tap connects pixel o
  // of the output (or its gradient) with pixel o + shift of one phase.
  struct PhaseShift {
    int64_t phase, shift;
  };
  PhaseShift phase_shift(int64_t tap) const {
    const int64_t at = tap * dilation - padding, phase = (at % stride + stride) % stride;
    return {phase, (at - phase) / stride};
  }

  // Return the maximum distance from the first to the last source of an output, plus 1.
  int64_t span() const {
    const int64_t distance = (taps - 1) * dilation;
    return std::min(source_size, (transposed ? distance / stride : distance) + 1);
  }
};

OPS_DEVICE inline Axis vertical_axis(const Windows& g, bool transposed) {
  return {transposed, g.h, g.out_h, g.kernel_h, g.stride_h, g.padding_h, g.dilation_h};
}

OPS_DEVICE inline Axis horizontal_axis(const Windows& g, bool transposed) {
  return {transposed, g.w, g.out_w, g.kernel_w, g.stride_w, g.padding_w, g.dilation_w};
}

}  // namespace ops
