// How the CPU computes an involution and its gradients.
//
// Vectors hold adjacent pixels of a row. Rows of x, weight and gradients are copied into buffers
// [channel][pixel] in the accumulator's type, whatever the dtype and memory format; a weight is
// loaded once a pixel then, and meets the channels of its group in registers. Rows of images stay
// in a ring, zeros around them, for as long as the kernel spans them.
//
// The involution and its input gradient are both correlations of a source, the input or
// grad_output, with the weight.
#pragma once

#include <vector>

#include "core/cpu/axis.h"
#include "involution2d/op.h"

namespace ops::cpu {

constexpr int64_t kMostSums = 8;  // vectors that stay in registers: of channels or of taps

// Every `step`-th pixel of a row, adjacent in a buffer: `count` from `first` on.
struct Pixels {
  int64_t first, step, count;
  int64_t start;  // in the buffer's row
};

// A row of a correlation. Adjacent pixels of one image are `stride` apart in the other, the source
// or, in the input gradient, the output: that one is cut into the pixels of each phase.
struct RowPlan {
  struct Tap {
    int64_t column;  // of the kernel
    int64_t source;  // which of the sources; −1 where it is all padding
    int64_t shift;   // from an output's place in its pixels to its source's
  };
  struct Outputs {
    Pixels pixels;
    std::vector<Tap> taps;
  };

  std::vector<Pixels> sources;
  std::vector<Outputs> outputs;
  int64_t width = 0;      // of a buffer's row of sources
  int64_t out_width = 0;  // of a buffer's row of outputs

  RowPlan(const Axis& axis, int64_t lanes) {
    if (axis.transposed) {
      sources.push_back({0, 1, axis.source_size, 0});
      for (int64_t phase = 0; phase < std::min(axis.stride, axis.out_size); ++phase) {
        outputs.push_back({every(axis.stride, phase, axis.out_size), {}});
        for (int64_t tap = 0; tap < axis.taps; ++tap) {
          const int64_t at = phase + axis.padding - tap * axis.dilation;
          if (at % axis.stride == 0) {
            outputs.back().taps.push_back({tap, 0, at / axis.stride});
          }
        }
      }
    } else {
      outputs.push_back({{0, 1, axis.out_size, 0}, {}});
      for (int64_t tap = 0; tap < axis.taps; ++tap) {
        const int64_t at = tap * axis.dilation - axis.padding;
        const int64_t phase = (at % axis.stride + axis.stride) % axis.stride;
        outputs[0].taps.push_back({tap, find_source(axis, phase), (at - phase) / axis.stride});
      }
    }
    lay_out(lanes);
  }

  int64_t place(const Tap& tap) const { return sources[tap.source].start + tap.shift; }

 private:
  static Pixels every(int64_t step, int64_t first, int64_t size) {
    return {first, step, first < size ? (size - 1 - first) / step + 1 : 0, 0};
  }

  int64_t find_source(const Axis& axis, int64_t phase) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].first == phase) {
        return i;
      }
    }
    sources.push_back(every(axis.stride, phase, axis.source_size));
    return sources.size() - 1;
  }

  // Between the sources' pixels lie as many zeros as taps and whole vectors read beyond them.
  void lay_out(int64_t lanes) {
    for (size_t i = 0; i < sources.size(); ++i) {
      int64_t left = 0, right = 0;
      for (Outputs& out : outputs) {
        for (Tap& tap : out.taps) {
          const int64_t end = tap.shift + out.pixels.count;
          if (tap.source != static_cast<int64_t>(i)) {
            continue;
          }
          if (end <= 0 || tap.shift >= sources[i].count) {
            tap.source = -1;
            continue;
          }
          left = std::max(left, -tap.shift);
          right = std::max(right, end - sources[i].count);
        }
      }
      sources[i].start = width + left;
      width = sources[i].start + sources[i].count + right + lanes;
    }
    for (const Outputs& out : outputs) {
      out_width = std::max(out_width, (out.pixels.count + lanes - 1) / lanes * lanes);
    }
    width = std::max(width, out_width);
  }
};

enum class Pass { forward, backward_input, backward_weight };

// A pass, ready to be computed: `out` from `source` (x, or grad_output for the input gradient) and
// `factor` (the weight, or grad_output for the weight gradient).
template <typename T>
struct Involution {
  const InvolutionGeometry& g;
  Axis vertical, horizontal;
  RowPlan row;
  const T *source, *factor;
  T* out;
  ImageStrides source_strides, factor_strides, out_strides;
  int64_t source_channels, factor_channels, out_channels;  // of a group; a weight's are its taps
  int64_t weight_width;                                    // of a buffer's row of weights

  Involution(const InvolutionGeometry& g, Pass pass, int64_t lanes, const T* source,
             const T* factor, T* out)
      : g(g),
        vertical(vertical_axis(g, pass == Pass::backward_input)),
        horizontal(horizontal_axis(g, pass == Pass::backward_input)),
        row(horizontal, lanes),
        source(source),
        factor(factor),
        out(out),
        source_strides(g.input_strides()),
        factor_strides(g.weight_strides()),
        out_strides(g.output_strides()),
        source_channels(g.group_channels()),
        factor_channels(g.taps()),
        out_channels(g.group_channels()),
        weight_width(row.out_width) {
    if (pass == Pass::backward_input) {
      std::swap(source_strides, out_strides);
      weight_width = row.width;
    } else if (pass == Pass::backward_weight) {
      std::swap(factor_strides, out_strides);
      std::swap(factor_channels, out_channels);
    }
  }
};

// Where a tap finds its weights and its source, in elements of the buffers.
struct TapPlace {
  int64_t weight, source;
};

// What a thread works in, zeros at first: a ring of rows of the source and a last row that stays
// zero, for each channel of a group; rows of weights, and of outputs.
template <typename A>
struct InvolutionWorkspace {
  int64_t ring_rows;
  int64_t pitch;  // from one channel of the ring to the next
  std::vector<TapPlace> taps;
  A *ring, *weights, *rows;

  template <typename T>
  explicit InvolutionWorkspace(const Involution<T>& p)
      : ring_rows(p.vertical.span()),
        // an odd number of cache lines, or else channels would share their place in the cache
        pitch(((ring_rows + 1) * p.row.width + kLine - 1) / kLine * kLine | kLine),
        taps(p.g.taps()),
        memory_(p.g.group_channels() * (pitch + p.row.out_width) + p.g.taps() * p.weight_width +
                3 * kLine) {
    ring = aligned(memory_.data());
    weights = aligned(ring + p.g.group_channels() * pitch);
    rows = aligned(weights + p.g.taps() * p.weight_width);
  }

  // Lists the taps of row h of the outputs, in the input gradient those that are not all padding.
  template <typename T>
  int64_t find_taps(const Involution<T>& p, const RowPlan::Outputs& out, int64_t h) {
    int64_t count = 0;
    for (int64_t a = 0; a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a);
      for (const RowPlan::Tap& tap : out.taps) {
        const int64_t weight = (a * p.g.kernel_w + tap.column) * p.weight_width;
        if (at >= 0 && tap.source >= 0) {
          const int64_t place = p.row.place(tap);
          taps[count++] = {p.vertical.transposed ? weight + place : weight,
                           at % ring_rows * p.row.width + place};
        } else if (!p.vertical.transposed) {
          taps[count++] = {weight, ring_rows * p.row.width};
        }
      }
    }
    return count;
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(A);

  static A* aligned(A* p) {
    return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64 / sizeof(A);
  }

  std::vector<A> memory_;
};

}  // namespace ops::cpu
