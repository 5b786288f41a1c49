// CPU involution: plan and buffers of a pass over rows.
//
//   source row      ring buffer [channel][kernel rows][pixel]          weights [tap][pixel]
//   ┌──────────┐    ┌───┬──────────────────────────┬───┐               ┌───────────────────┐
//   │ any      │ ─► │ 0 │ row y                    │ 0 │   ──► FMA ◄── │ row of outputs    │
//   │ layout   │    │ 0 │ row y + 1 …              │ 0 │        │      └───────────────────┘
//   └──────────┘    └───┴──────────────────────────┴───┘        ▼
//                    zero padding                          sums of up to 8 channels
//
//   thread:  a range of output rows of (image, group), its own ring buffer
//   lanes:   adjacent pixels of a row; a weight vector is loaded once for up to 8 channels
//
// Buffers hold acc_t<T>. Forward and input gradient correlate a source (x or grad_output) with the
// weight. The weight gradient sums grad_output · x over the channels of the group, up to 8 taps.
#pragma once

#include <vector>

#include "core/axis.h"
#include "involution2d/op.h"

namespace ops::cpu {

constexpr int64_t kMaxSums = 8;  // sums in registers: channels or taps

// Every `step`-th pixel of a row from `first` on, `count` in all, adjacent in a buffer.
struct PixelPhase {
  int64_t first, step, count;
  int64_t start;  // column in the buffer row
};

// Horizontal plan of a correlation. With stride s, the source row (input gradient: the output row)
// is split into s phases of every s-th pixel, so that adjacent outputs read adjacent source pixels.
struct PhasePlan {
  struct Tap {
    int64_t kernel_column;
    int64_t source;  // index into `sources`; −1: padding only
    int64_t shift;   // source position minus output position
  };
  struct Outputs {
    PixelPhase pixels;
    std::vector<Tap> taps;
  };

  std::vector<PixelPhase> sources;
  std::vector<Outputs> outputs;
  int64_t width = 0;      // of a ring buffer row
  int64_t out_width = 0;  // of a row of outputs

  PhasePlan(const Axis& axis, int64_t lanes) {
    if (axis.transposed) {
      sources.push_back({0, 1, axis.source_size, 0});
      for (int64_t phase = 0; phase < std::min(axis.stride, axis.out_size); ++phase) {
        outputs.push_back({make_phase(axis.stride, phase, axis.out_size), {}});
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
        outputs[0].taps.push_back({tap, source_of_phase(axis, phase), (at - phase) / axis.stride});
      }
    }
    assign_columns(lanes);
  }

  int64_t column(const Tap& tap) const { return sources[tap.source].start + tap.shift; }

 private:
  static PixelPhase make_phase(int64_t step, int64_t first, int64_t size) {
    return {first, step, first < size ? (size - 1 - first) / step + 1 : 0, 0};
  }

  int64_t source_of_phase(const Axis& axis, int64_t phase) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].first == phase) {
        return i;
      }
    }
    sources.push_back(make_phase(axis.stride, phase, axis.source_size));
    return sources.size() - 1;
  }

  // Separate the phases by the zeros that taps and whole vectors read beyond their ends.
  void assign_columns(int64_t lanes) {
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

// One pass: `out` from `source` and `factor`, see op.h.
template <typename T>
struct InvolutionPlan {
  const InvolutionGeometry& g;
  Axis vertical, horizontal;
  PhasePlan row;
  const T *source, *factor;
  T* out;
  ImageStrides source_strides, factor_strides, out_strides;
  int64_t source_channels, factor_channels, out_channels;  // per group; weight: taps
  int64_t weight_width;                                    // of a row of weights

  InvolutionPlan(const InvolutionGeometry& g, Pass pass, int64_t lanes, const T* source,
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

// Offsets of a tap's weights and source pixels in the buffers.
struct TapOffsets {
  int64_t weight, source;
};

// Buffers of a thread: for each channel of a group a ring of source rows and one row of zeros; rows
// of weights; rows of outputs. Initialised with zeros.
template <typename A>
struct InvolutionWorkspace {
  int64_t ring_rows;
  int64_t pitch;  // channel stride of the ring
  std::vector<TapOffsets> taps;
  A *ring, *weights, *rows;

  template <typename T>
  explicit InvolutionWorkspace(const InvolutionPlan<T>& p)
      : ring_rows(p.vertical.span()),
        // an odd number of cache lines: channels map to different cache sets
        pitch(((ring_rows + 1) * p.row.width + kLine - 1) / kLine * kLine | kLine),
        taps(p.g.taps()),
        memory_(p.g.group_channels() * (pitch + p.row.out_width) + p.g.taps() * p.weight_width +
                3 * kLine) {
    ring = aligned(memory_.data());
    weights = aligned(ring + p.g.group_channels() * pitch);
    rows = aligned(weights + p.g.taps() * p.weight_width);
  }

  // List the taps of output row h; the input gradient omits taps that read only padding.
  template <typename T>
  int64_t list_taps(const InvolutionPlan<T>& p, const PhasePlan::Outputs& out, int64_t h) {
    int64_t count = 0;
    for (int64_t a = 0; a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a);
      for (const PhasePlan::Tap& tap : out.taps) {
        const int64_t weight = (a * p.g.kernel_w + tap.kernel_column) * p.weight_width;
        if (at >= 0 && tap.source >= 0) {
          const int64_t column = p.row.column(tap);
          taps[count++] = {p.vertical.transposed ? weight + column : weight,
                           at % ring_rows * p.row.width + column};
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
