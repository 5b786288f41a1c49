// CPU involution: plan and buffers of a pass over rows.
//
//   image row        ring of source rows              ring of factor rows      image row
//   ┌────────┐       ┌───┬─────────────────────┬───┐  ┌────────────────────┐   ┌────────┐
//   │ any    │ ────► │ 0 │ those that a row of │ 0 │  │ one row; input     │◄──│ any    │
//   │ layout │       │   │ outputs reads       │   │  │ gradient: as many  │   │ layout │
//   └────────┘       └───┴─────────────────────┴───┘  └────────────────────┘   └────────┘
//                    zero padding         └───► FMA ◄────┘
//                                                ▼
//                                 sums of up to 8 channels or taps
//
//   thread:  a range of output rows of (image, group), its own buffers
//   lanes:   adjacent pixels of a row; a factor vector is loaded once for up to 8 sums
//
//   pass              source        factor        sums
//   forward           x             weight        of channels, over the taps
//   input gradient    grad_output   weight        of channels, over the taps
//   weight gradient   x             grad_output   of taps, over the channels of the group
//
// In the input gradient the weight of a tap belongs to its source pixel. Buffers hold acc_t<T>.
#pragma once

#include <vector>

#include "core/axis.h"
#include "involution2d/op.h"

namespace ops::involution2d {

constexpr int64_t kMaxSums = 8;  // sums in registers: channels or taps

// Every `step`-th pixel of an image row from `first` on, `count` in all, adjacent in a buffer row.
struct PixelPhase {
  int64_t first, step, count;
  int64_t start;  // column in the buffer row
};

// Horizontal plan. With stride s, the source row (input gradient: the output row) is split into s
// phases (see Axis), so that adjacent outputs read adjacent source pixels.
struct PhaseRows {
  struct Tap {
    int64_t kernel_column;
    int64_t source;    // index into `sources`; −1: padding only
    int64_t position;  // of the source pixel that output 0 reads
  };
  struct Outputs {
    PixelPhase pixels;
    std::vector<Tap> taps;
  };

  std::vector<PixelPhase> sources;
  std::vector<Outputs> outputs;
  int64_t width = 0;      // of a row of the source ring
  int64_t out_width = 0;  // of a row of outputs

  PhaseRows(const Axis& axis, int64_t lanes) {
    if (axis.transposed) {
      sources.push_back({0, 1, axis.source_size, 0});
      for (int64_t phase = 0; phase < std::min(axis.stride, axis.out_size); ++phase) {
        outputs.push_back({pixels_of(phase, axis.stride, axis.out_size), {}});
      }
    } else {
      outputs.push_back({{0, 1, axis.out_size, 0}, {}});
    }
    for (int64_t tap = 0; tap < axis.taps; ++tap) {
      const auto [phase, shift] = axis.phase_shift(tap);
      if (!axis.transposed) {
        outputs[0].taps.push_back({tap, source_of(phase, axis), shift});
      } else if (phase < static_cast<int64_t>(outputs.size())) {
        outputs[phase].taps.push_back({tap, 0, -shift});
      }
    }
    assign_columns(lanes);
  }

  int64_t column(const Tap& tap) const { return sources[tap.source].start + tap.position; }

 private:
  static PixelPhase pixels_of(int64_t phase, int64_t stride, int64_t size) {
    return {phase, stride, phase < size ? (size - 1 - phase) / stride + 1 : 0, 0};
  }

  int64_t source_of(int64_t phase, const Axis& axis) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].first == phase) {
        return i;
      }
    }
    sources.push_back(pixels_of(phase, axis.stride, axis.source_size));
    return sources.size() - 1;
  }

  // Separate the phases by the zeros that taps read beyond their ends. Whole vectors of outputs
  // read any pixels beyond those.
  void assign_columns(int64_t lanes) {
    int64_t zeros = 0;
    for (Outputs& out : outputs) {
      for (Tap& tap : out.taps) {
        const int64_t end = tap.position + out.pixels.count, count = sources[tap.source].count;
        if (end <= 0 || tap.position >= count) {
          tap.source = -1;
        } else {
          zeros = std::max({zeros, -tap.position, end - count});
        }
      }
      out_width = std::max(out_width, (out.pixels.count + lanes - 1) / lanes * lanes);
    }
    for (PixelPhase& source : sources) {
      source.start = width + zeros;
      width = source.start + source.count;
    }
    width = std::max(width + zeros + lanes, out_width);
  }
};

// An image of a pass, split into groups of channels.
template <typename T>
struct GroupedImage {
  T* data;
  ImageStrides strides;
  int64_t channels;  // per group; weight: taps

  T* at(int64_t n, int64_t group) const {
    return data + n * strides.n + group * channels * strides.c;
  }
};

// One pass: `out` from `source` and `factor`, see op.h.
template <typename T>
struct Plan {
  const Geometry& g;
  Pass pass;
  Axis vertical, horizontal;
  PhaseRows row;
  GroupedImage<const T> source, factor;
  GroupedImage<T> out;
  std::vector<PixelPhase> factor_pixels;  // of a row of factors

  Plan(const Geometry& g, Pass pass, int64_t lanes, const T* source, const T* factor, T* out)
      : g(g),
        pass(pass),
        vertical(vertical_axis(g, pass == Pass::backward_input)),
        horizontal(horizontal_axis(g, pass == Pass::backward_input)),
        row(horizontal, lanes),
        source{source, g.input_strides(), g.group_channels()},
        factor{factor, g.weight_strides(), g.taps()},
        out{out, g.output_strides(), g.group_channels()},
        factor_pixels{{0, 1, g.out_w, transposed() ? row.sources[0].start : 0}} {
    if (transposed()) {
      std::swap(this->source.strides, this->out.strides);
    } else if (pass == Pass::backward_weight) {
      std::swap(this->factor.strides, this->out.strides);
      std::swap(this->factor.channels, this->out.channels);
    }
  }

  bool transposed() const { return vertical.transposed; }
};

// RowRing buffer of the rows of a group that an output row reads.
template <typename A>
struct RowRing {
  int64_t rows, row, channel;  // number of rows; strides
  A* data = nullptr;
  int64_t next_row = 0;  // first row that was not copied
};

// Offsets of a tap's factors (weight gradient: outputs) and source pixels in the buffers.
struct TapOffsets {
  int64_t factor, source;
};

// Buffers of a thread, initialised with zeros. After the rows of each channel of the source ring
// there is a row of zeros.
template <typename A>
struct Workspace {
  RowRing<A> source, factor;
  A* out;  // [channel][pixel]
  std::vector<TapOffsets> taps;

  template <typename T>
  explicit Workspace(const Plan<T>& p)
      : source{p.vertical.span(), p.row.width, 0}, taps(p.g.taps()) {
    // an odd number of cache lines: channels map to different cache sets
    source.channel = ((source.rows + 1) * source.row + kLine - 1) / kLine * kLine | kLine;
    factor.rows = p.transposed() ? source.rows : 1;
    factor.channel = p.transposed() ? p.row.width : p.row.out_width;
    factor.row = p.factor.channels * factor.channel;
    const int64_t source_size = p.source.channels * source.channel;
    const int64_t factor_size = factor.rows * factor.row;
    memory_.resize(source_size + factor_size + p.out.channels * p.row.out_width + 3 * kLine);
    source.data = aligned(memory_.data());
    factor.data = aligned(source.data + source_size);
    out = aligned(factor.data + factor_size);
  }

  // List the taps of output row h; the input gradient omits taps that read only padding.
  template <typename T>
  int64_t list_taps(const Plan<T>& p, const PhaseRows::Outputs& outputs, int64_t h) {
    int64_t count = 0;
    for (int64_t a = 0; a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a);
      for (const PhaseRows::Tap& tap : outputs.taps) {
        const int64_t channel = (a * p.g.kernel_w + tap.kernel_column) * factor.channel;
        if (at >= 0 && tap.source >= 0) {
          const int64_t slot = at % source.rows, column = p.row.column(tap);
          taps[count++] = {p.transposed() ? channel + slot * factor.row + column : channel,
                           slot * source.row + column};
        } else if (!p.transposed()) {
          taps[count++] = {channel, source.rows * source.row};
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

}  // namespace ops::involution2d
