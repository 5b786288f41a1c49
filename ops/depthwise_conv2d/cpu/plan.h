// How the CPU computes a depthwise convolution and its gradients.
//
// Vectors hold one pixel of several channels, in either memory format; where there are few
// channels, of several images, and where these are few, of several bands of their output rows. So a
// tap is one multiply-add of vectors, whatever the filter, and where adjacent taps take each
// other's sources, three of them load each source once. Source rows are copied into a ring of rows
// [pixel][lane], zero-padded left and right, in the accumulator's type; it holds what the taps of
// one output row span, and stays in the first-level cache. Only where a source meets few taps, as
// small filters and strides make it, channels-last images are read where they are.
//
// The convolution and its input gradient are both correlations of a source, the input or
// grad_output, with the filter.
#pragma once

#include <algorithm>
#include <vector>

#include "core/cpu/axis.h"
#include "core/cpu/isa.h"
#include "depthwise_conv2d/op.h"

namespace ops::cpu {

constexpr int64_t kLine = 64;         // bytes that memory comes in
constexpr int64_t kMostLanes = 32;    // of two vectors
constexpr int64_t kMostOutputs = 14;  // vectors of sums that fit into registers
constexpr int64_t kFewTaps = 6;       // in a row: to share them is not worth a second block

// Outputs of a block whose taps are shared: beside three of them, 16 registers hold fewer.
inline int64_t most_sharing() {
  return vector_bytes() < kLine ? 12 : kMostOutputs;
}

// Where a tap finds its weights and its source, in elements.
struct Tap {
  int64_t weight, source;
};

// Adjacent outputs that are computed together, from taps that are not all padding.
struct Block {
  int64_t outputs;
  int64_t out, source;  // of the first, in pixels and in elements
  int64_t tap_begin, tap_end;
  bool shared;  // what a tap takes for an output, the tap before it takes for the next output

  bool has_taps_of(const Block& other) const {
    return tap_begin == other.tap_begin && tap_end == other.tap_end;
  }
};

// An output row of a correlation, cut into blocks. Outputs of one block take the same taps, so in
// the input gradient they lie `stride` apart.
struct Columns {
  int64_t out_step, source_step;  // from one output of a block to the next, likewise
  int64_t left = 0, width = 0;    // zeros before the source, and all that blocks read, in pixels
  std::vector<Tap> taps;
  std::vector<Block> blocks;

  // A pixel has so many lanes, a block at most `most` outputs. Unless there are zeros around the
  // source, blocks take no tap that is padding to any of their outputs.
  Columns(const Axis& axis, int64_t lanes, int64_t most, bool padded) {
    const int64_t phases = axis.transposed ? axis.stride : 1;
    const int64_t step = axis.transposed ? 1 : axis.stride;
    out_step = phases;
    source_step = step * lanes;
    width = axis.source_size;
    for (int64_t phase = 0; phase < std::min(phases, axis.out_size); ++phase) {
      add_phase(axis, phase, phases, step, lanes, most, padded);
    }
    width += left;
  }

 private:
  // The outputs phase, phase + phases, …, whose sources lie `step` apart.
  void add_phase(const Axis& axis, int64_t phase, int64_t phases, int64_t step, int64_t lanes,
                 int64_t most, bool padded) {
    const int64_t first_tap = taps.size();
    for (int64_t i = 0; i < axis.taps; ++i) {
      const int64_t tap = axis.transposed ? axis.taps - 1 - i : i;  // sources ascend
      const int64_t at = axis.transposed ? phase + axis.padding - tap * axis.dilation
                                         : tap * axis.dilation - axis.padding;
      if (at % phases == 0) {
        taps.push_back({tap * lanes, at / phases * lanes});
      }
    }
    const int64_t num_taps = taps.size() - first_tap;
    const bool adjacent =
        num_taps > 2 && taps[first_tap + 1].source - taps[first_tap].source == source_step;
    // A block reads at most as far beyond the source as it is long: far apart, outputs are alone.
    most = std::min(most, 1 + (axis.source_size + kMostOutputs) / step);
    const auto source = [&](int64_t tap, int64_t output) {
      return taps[tap].source / lanes + output * step;
    };
    const auto block = [&](int64_t begin, int64_t end) {
      Block block{end - begin,
                  phase + begin * phases,
                  begin * step * lanes,
                  first_tap,
                  static_cast<int64_t>(taps.size()),
                  adjacent && end - begin <= most_sharing()};
      while (block.tap_begin < block.tap_end && source(block.tap_begin, end - 1) < 0) {
        ++block.tap_begin;
      }
      while (block.tap_begin < block.tap_end &&
             source(block.tap_end - 1, begin) >= axis.source_size) {
        --block.tap_end;
      }
      return block;
    };
    const int64_t outputs = (axis.out_size - 1 - phase) / phases + 1;
    for (int64_t begin = 0, end; begin < outputs; begin = end) {
      end = padded ? outputs : begin + 1;
      while (end < outputs && block(begin, begin + 1).has_taps_of(block(end, end + 1))) {
        ++end;
      }
      const bool alone = end - begin <= most && num_taps < kFewTaps;
      const int64_t fit = adjacent && !alone ? std::min(most, most_sharing()) : most;
      // Blocks of one size may overlap, but all run the same code: no branch is predicted wrongly.
      const int64_t count = (end - begin + fit - 1) / fit, size = (end - begin + count - 1) / count;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = begin + i * (end - begin - size) / std::max<int64_t>(1, count - 1);
        blocks.push_back(block(at, at + size));
        if (blocks.back().tap_begin < blocks.back().tap_end) {
          left = std::max(left, -source(blocks.back().tap_begin, at));
          width = std::max(width, source(blocks.back().tap_end - 1, at + size - 1) + 1);
        }
      }
    }
  }
};

// Bands of output rows, which are computed like images of their own: row h of band b is row
// h + b · out_rows of the image. Its sources begin `above` rows over the image, so that those of
// the first band are not negative; rows that are not in the image are zeros.
struct Bands {
  int64_t count = 1;                         // in an image
  int64_t out_rows, source_rows, above = 0;  // from one band to the next, likewise
  Axis axis;                                 // of a band

  Bands(const Axis& image, int64_t most) : out_rows(image.out_size), source_rows(0), axis(image) {
    // The input gradient takes rows that lie `stride` apart from adjacent sources.
    const int64_t unit = image.transposed ? image.stride : 1;
    const int64_t units = (image.out_size + unit - 1) / unit;
    const int64_t rows = (units + most - 1) / std::max<int64_t>(1, most) * unit;
    if (most <= 1 || rows >= image.out_size) {
      return;
    }
    count = (image.out_size + rows - 1) / rows;
    out_rows = axis.out_size = rows;
    const int64_t last_tap = (image.taps - 1) * image.dilation;
    if (image.transposed) {
      source_rows = rows / image.stride;
      above = std::max<int64_t>(0, last_tap - image.padding + image.stride - 1) / image.stride;
      axis.padding += above * image.stride;
      axis.source_size = (rows - 1 + axis.padding) / image.stride + 1;
    } else {
      source_rows = rows * image.stride;
      above = image.padding;
      axis.padding = 0;
      axis.source_size = (rows - 1) * image.stride + last_tap + 1;
    }
  }
};

// What the lanes of a vector hold: lane i · channels + c is channel c of image, or band of an
// image, i. Where images or channels run out, the last lanes are idle.
struct Lanes {
  int64_t lanes, channels, images;
  Bands bands;
  int64_t channel_groups, image_groups;

  Lanes(const DepthwiseGeometry& g, const Axis& vertical, int64_t lanes)
      : lanes(lanes),
        channels(std::min(g.c, lanes)),
        images(lanes / channels),
        bands(vertical, images / std::max<int64_t>(1, g.n)),
        channel_groups((g.c + channels - 1) / channels),
        image_groups((g.n * bands.count + images - 1) / images) {}
};

// Where the lanes of a vector lie in an image tensor.
template <typename T>
struct Place {
  T* start[kMostLanes];  // row 0 of each lane in use in NCHW, of each image in use in NHWC
  int64_t starts;
  int64_t channels;           // in use, of each image
  int64_t width, row, pixel;  // pixel is 0 for NCHW
  int64_t ahead;              // rows, from the first, that are prefetched
  int64_t next;               // in NCHW, from a channel to that of the next group
  bool bands;
  int64_t first[kMostLanes];  // of bands: where row 0 is in the image
  int64_t height;             // and the image's rows

  // The starts, a bit each, whose row h is in the image.
  uint32_t present(int64_t h) const {
    uint32_t bits = UINT32_MAX >> (kMostLanes - starts);
    for (int64_t i = 0; bands && i < starts; ++i) {
      const bool there = h + first[i] >= 0 && h + first[i] < height;
      bits &= ~(uint32_t{!there} << i);
    }
    return bits;
  }
};

// An image tensor: where it is, its size, and from one image, and one channel, to the next.
template <typename T>
struct Images {
  T* start;
  int64_t height, width, n, c;
};

template <typename T>
Images<const T> input_images(const DepthwiseGeometry& g, const T* x) {
  return {x, g.h, g.w, g.input_n, g.input_c};
}

template <typename T>
Images<T> dense_images(const DepthwiseGeometry& g, T* start, int64_t height, int64_t width) {
  const auto strides = image_strides(g.channels_last, g.c, height, width);
  return {start, height, width, strides.n, strides.c};
}

// Row 0 of band b is row b · band − above of an image.
template <typename T>
Place<T> place(const DepthwiseGeometry& g, const Lanes& lanes, const Images<T>& images,
               int64_t image_group, int64_t channel_group, int64_t band, int64_t above) {
  const int64_t n = image_group * lanes.images, c = channel_group * lanes.channels;
  const int64_t channels = std::min(lanes.channels, g.c - c), width = images.width;
  const int64_t bands = lanes.bands.count;
  Place<T> p{{},        0,  channels,     width, width, 0, 0, lanes.channels * images.c,
             bands > 1, {}, images.height};
  if (g.channels_last) {
    p.row = width * g.c;
    p.pixel = g.c;
    if (g.c * sizeof(T) > kLine) {  // else lines are read one after the other
      p.ahead = images.height;
    }
  }
  for (int64_t i = n; i < std::min(n + lanes.images, g.n * bands); ++i) {
    for (int64_t j = c; j < (g.channels_last ? c + 1 : c + channels); ++j) {
      p.first[p.starts] = i % bands * band - above;
      p.start[p.starts] = images.start + i / bands * images.n + j * images.c;
      p.start[p.starts] += p.first[p.starts] * p.row;
      ++p.starts;
    }
  }
  return p;
}

template <typename T>
Place<T> source_place(const DepthwiseGeometry& g, const Lanes& lanes, const Images<T>& images,
                      int64_t image_group, int64_t group) {
  return place(g, lanes, images, image_group, group, lanes.bands.source_rows, lanes.bands.above);
}

template <typename T>
Place<T> out_place(const DepthwiseGeometry& g, const Lanes& lanes, const Images<T>& images,
                   int64_t image_group, int64_t group) {
  return place(g, lanes, images, image_group, group, lanes.bands.out_rows, 0);
}

// The kernel rows of an output row that are not all padding.
struct TapRows {
  int64_t count;
  int64_t last;  // source row
};

// Source rows at hand, in a ring or in the image itself: row h is at h modulo their number. Sizes
// are in elements.
struct SourceRows {
  int64_t count, size;
};

// What a thread works in: a ring of source rows, and a row of outputs; zeros at first.
template <typename A>
class Workspace {
 public:
  std::vector<Tap> rows;

  Workspace(int64_t taps, int64_t ring_size, int64_t row_size)
      : rows(taps), ring_size_(ring_size), memory_(ring_size + row_size + kLine / sizeof(A)) {}

  A* ring() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (kLine - address % kLine) % kLine / sizeof(A);
  }
  A* row() { return ring() + ring_size_; }

  // Lists the kernel rows of output row h in `rows`; one has weight_row elements.
  TapRows find_rows(const Axis& vertical, int64_t h, int64_t weight_row, SourceRows sources) {
    TapRows found{0, -1};
    for (int64_t tap = 0; tap < vertical.taps; ++tap) {
      const int64_t at = vertical.source(h, tap);
      if (at >= 0) {
        found.last = std::max(found.last, at);
        rows[found.count++] = {tap * weight_row, at % sources.count * sources.size};
      }
    }
    return found;
  }

 private:
  int64_t ring_size_;
  std::vector<A> memory_;
};

// Either correlation, ready to be computed.
template <typename T>
struct Correlation {
  using A = acc_t<T>;

  const DepthwiseGeometry& g;
  Lanes lanes;
  Columns columns;
  SourceRows source_rows;
  int64_t vectors;  // of lanes in a block
  bool direct;      // sources stay in the image, where a pixel has all channels as lanes
  Images<const T> source;
  const A *weight, *bias;  // [group of channels][tap][lane], [group of channels][lane]
  Images<T> out;
};

}  // namespace ops::cpu
