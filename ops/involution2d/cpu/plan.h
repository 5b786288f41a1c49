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
//   pass              source        factor        sums           terms of a sum
//   forward           x             weight        of channels    taps
//   input gradient    grad_output   weight        of channels    taps
//   weight gradient   x             grad_output   of taps        channels of the group
//
// In the input gradient the weight of a tap belongs to its source pixel. Buffers hold acc_t<T>.
#pragma once

#include <vector>

#include "core/axis.h"
#include "involution2d/op.h"

namespace ops::involution2d {

// Every `step`-th pixel of an image row from `first` on, `count` in all: adjacent in a buffer row,
// from column `start` on.
struct PixelPhase {
  int64_t first, step, count;
  int64_t start = 0;
};

// Horizontal plan. With stride s, the image row (the source; in the input gradient the output) is
// split into s phases (see Axis), so that adjacent outputs read adjacent source pixels.
struct PhaseRows {
  struct Tap {
    int64_t kernel_column;
    int64_t source;    // index into `sources`; −1: padding only
    int64_t position;  // of the source pixel that output 0 reads
  };

  std::vector<PixelPhase> sources, outputs;
  std::vector<std::vector<Tap>> taps;  // of each phase of outputs
  int64_t width = 0;                   // of a row of the source ring
  int64_t out_width = 0;               // of a row of outputs

  PhaseRows(const Axis& axis, int64_t lanes)
      : sources(phases(axis.source_size, axis.transposed ? 1 : axis.stride)),
        outputs(phases(axis.out_size, axis.transposed ? axis.stride : 1)),
        taps(outputs.size()) {
    int64_t zeros = 0;  // that taps read beyond the ends of a phase
    for (int64_t tap = 0; tap < axis.taps; ++tap) {
      const auto [phase, shift] = axis.phase_shift(tap);
      const size_t output = axis.transposed ? phase : 0, source = axis.transposed ? 0 : phase;
      if (output >= outputs.size()) {
        continue;
      }
      const int64_t position = axis.transposed ? -shift : shift;
      const int64_t end = position + outputs[output].count;
      if (source >= sources.size() || position >= sources[source].count || end <= 0) {
        taps[output].push_back({tap, -1, 0});
      } else {
        taps[output].push_back({tap, static_cast<int64_t>(source), position});
        zeros = std::max({zeros, -position, end - sources[source].count});
      }
    }
    for (PixelPhase& source : sources) {
      source.start = width + zeros;
      width = source.start + source.count;
    }
    out_width = (outputs[0].count + lanes - 1) / lanes * lanes;
    width = std::max(width + zeros + lanes, out_width);  // whole vectors read beyond the zeros
  }

  int64_t column(const Tap& tap) const { return sources[tap.source].start + tap.position; }

 private:
  // Split a row of `size` pixels into phases; the first is the longest.
  static std::vector<PixelPhase> phases(int64_t size, int64_t stride) {
    std::vector<PixelPhase> all{{0, stride, (size + stride - 1) / stride}};
    for (int64_t phase = 1; phase < std::min(stride, size); ++phase) {
      all.push_back({phase, stride, (size - 1 - phase) / stride + 1});
    }
    return all;
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

// Ring buffer of the rows of a group that an output row reads.
template <typename A>
struct RowRing {
  int64_t rows, row, channel;  // number of rows; strides
  A* data = nullptr;
  int64_t next_row = 0;  // first row that was not copied
};

// Offsets in the buffers of a channel or tap: in the source ring, and among the factors (if it is a
// term of the sums) or the sums.
struct Offsets {
  int64_t source, other;
};

// Buffers of a thread, initialised with zeros. After the rows of each channel of the source ring
// there is a row of zeros.
template <typename A>
struct Workspace {
  RowRing<A> source, factor;
  A* out;                               // [channel or tap][pixel]
  std::vector<Offsets> channels, taps;  // taps: of one output row

  template <typename T>
  explicit Workspace(const Plan<T>& p)
      : source{p.vertical.span(), p.row.width, 0}, taps(p.g.taps()) {
    // an odd number of cache lines: channels map to different cache sets
    source.channel = ((source.rows + 1) * source.row + kLine - 1) / kLine * kLine | kLine;
    factor.rows = p.transposed() ? source.rows : 1;
    factor.channel = p.transposed() ? p.row.width : p.row.out_width;
    factor.row = p.factor.channels * factor.channel;
    for (int64_t c = 0; c < p.source.channels; ++c) {
      channels.push_back({c * source.channel, c * p.row.out_width});
    }
    const int64_t source_size = p.source.channels * source.channel;
    const int64_t factor_size = factor.rows * factor.row;
    memory_.resize(source_size + factor_size + p.out.channels * p.row.out_width + 3 * kLine);
    source.data = aligned(memory_.data());
    factor.data = aligned(source.data + source_size);
    out = aligned(factor.data + factor_size);
  }

  // List the taps of output row h and return their number; the input gradient omits taps that read
  // only padding.
  template <typename T>
  int64_t list_taps(const Plan<T>& p, const std::vector<PhaseRows::Tap>& columns, int64_t h) {
    int64_t count = 0;
    for (int64_t a = 0; a < p.vertical.taps; ++a) {
      const int64_t at = p.vertical.source(h, a), slot = at < 0 ? 0 : at % source.rows;
      for (const PhaseRows::Tap& tap : columns) {
        const int64_t channel = (a * p.g.kernel_w + tap.kernel_column) * factor.channel;
        if (at >= 0 && tap.source >= 0) {
          const int64_t column = p.row.column(tap);
          taps[count++] = {slot * source.row + column,
                           p.transposed() ? channel + slot * factor.row + column : channel};
        } else if (!p.transposed()) {
          taps[count++] = {source.rows * source.row, channel};
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
