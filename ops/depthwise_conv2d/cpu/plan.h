// CPU depthwise convolution: plan of the forward pass and the input gradient.
//
//      source image (NCHW)            ring of source rows           register block
//      ┌─────────┐ ─ lane 0           ┌───────────────────┐         ┌────────────┐
//      │ band 0  │        transpose   │ 0 │ [pixel] │ 0   │   FMA   │ R outputs  │
//      ├─────────┤ ─ lane 1 ────────► │ 0 │ [lane]  │ 0   │ ──────► │ × V vectors│ ──► output row
//      │ band 1  │                    └───────────────────┘         └────────────┘
//      └─────────┘ ─ lane 2 …          zero-padded, acc_t<T>
//
//   thread:  a range of output rows of all images and channels, in register blocks of R ≤ 14
//   lanes:   the same pixel of several channels. If C < lanes: of several images, too. If
//            2·N·C ≤ lanes: of several bands of output rows, too
//   ring:    the source rows that the taps of one output row span; stays in the L1 cache
//
// A tap is one multiply-add of vectors; up to three adjacent taps share each source load. Channels-
// last sources with few taps are read in place, without the ring (`in_place`): see dispatch.cpp.
#pragma once

#include <algorithm>
#include <vector>

#include "core/axis.h"
#include "core/cpu/isa.h"
#include "depthwise_conv2d/op.h"

namespace ops::depthwise_conv2d {

constexpr int64_t kCacheLine = 64;   // bytes
constexpr int64_t kMaxLanes = 32;    // of a group in the ring: two AVX-512 vectors of float
constexpr int64_t kMaxOutputs = 14;  // accumulator vectors of a block, in registers

// Maximum outputs of a block with shared loads: three taps and 12 accumulators fill 16 registers.
inline int64_t max_shared_outputs() {
  return cpu::vector_bytes() < kCacheLine ? 12 : kMaxOutputs;
}

// Offsets of a tap's weights and source, in elements.
struct Tap {
  int64_t weight, source;
};

// Register block: outputs of a row that are accumulated together.
struct Block {
  int64_t outputs;
  int64_t out, source;         // first output, in pixels; its source, in elements
  int64_t tap_begin, tap_end;  // taps with at least one source that is not padding
  bool shared;                 // tap t of output r + 1 reads the source of tap t + 1 of output r
  // Whether the first output's first tap and the last output's last tap are padding.
  bool pads_first = false, pads_last = false;
};

// Partition of an output row into register blocks. All outputs of a block have the same taps, but
// see pads_first and pads_last. In the input gradient, the outputs of a block are `stride` pixels
// apart: one phase of the transposed convolution.
struct RowPlan {
  int64_t out_step;             // between outputs of a block, in pixels
  int64_t source_step;          // between sources of these outputs, in elements
  bool extra_in_place = false;  // in place, and taps share source loads, or blocks read padding
  int64_t left = 0;             // zero pixels before a source row
  int64_t width = 0;            // pixels of a source row with zeros on both sides
  std::vector<Tap> taps;
  std::vector<Block> blocks;

  // Plan rows of pixels of `lanes` lanes, in blocks of at most `max_outputs`. Without zeros around
  // source rows (`padded`), a block may have one tap of padding at each end.
  RowPlan(const Axis& axis, int64_t lanes, int64_t max_outputs, bool padded) {
    const int64_t phases = axis.transposed ? axis.stride : 1;
    const int64_t step = axis.transposed ? 1 : axis.stride;
    out_step = phases;
    source_step = step * lanes;
    width = axis.source_size;
    for (int64_t phase = 0; phase < std::min(phases, axis.out_size); ++phase) {
      add_phase(axis, phase, phases, step, lanes, max_outputs, padded);
    }
    width += left;
  }

 private:
  // Add the outputs phase, phase + phases, …; their sources are `step` pixels apart.
  void add_phase(const Axis& axis, int64_t phase, int64_t phases, int64_t step, int64_t lanes,
                 int64_t max_outputs, bool padded) {
    const int64_t first_tap = taps.size();
    for (int64_t i = 0; i < axis.taps; ++i) {
      const int64_t tap = axis.transposed ? axis.taps - 1 - i : i;  // in order of the sources
      const int64_t at = axis.transposed ? phase + axis.padding - tap * axis.dilation
                                         : tap * axis.dilation - axis.padding;
      if (at % phases == 0) {
        taps.push_back({tap * lanes, at / phases * lanes});
      }
    }
    const int64_t end_tap = taps.size();
    const bool shared = end_tap - first_tap > 2 &&
                        taps[first_tap + 1].source - taps[first_tap].source == source_step;
    extra_in_place = extra_in_place || (shared && !padded);
    // Limit the zeros on either side of a source row, at most (outputs − 1) · step, to source_size
    // + kMaxOutputs. Only large strides shorten blocks.
    max_outputs = std::min({max_outputs, 1 + (axis.source_size + kMaxOutputs) / step,
                            shared ? max_shared_outputs() : kMaxOutputs});
    const auto source = [&](int64_t tap, int64_t output) {
      return taps[tap].source / lanes + output * step;
    };
    const auto block = [&](int64_t begin, int64_t end) {
      Block block{end - begin, phase + begin * phases, begin * source_step, first_tap, end_tap,
                  shared};
      while (block.tap_begin < block.tap_end && source(block.tap_begin, end - 1) < 0) {
        ++block.tap_begin;
      }
      while (block.tap_begin < block.tap_end &&
             source(block.tap_end - 1, begin) >= axis.source_size) {
        --block.tap_end;
      }
      if (!padded && block.tap_begin < block.tap_end) {
        block.pads_first = source(block.tap_begin, begin) < 0;
        block.pads_last = source(block.tap_end - 1, end - 1) >= axis.source_size;
      }
      return block;
    };
    // Return whether a block reads padding at most in the first tap of its first output and in the
    // last tap of its last output.
    const auto reads_image = [&](int64_t begin, int64_t end) {
      const Block whole = block(begin, end);
      const int64_t first = whole.tap_begin, last = whole.tap_end - 1;
      const bool one_tap = first >= last;
      return (!whole.pads_first ||
              (source(first, begin + 1) >= 0 && (one_tap || source(first + 1, begin) >= 0))) &&
             (!whole.pads_last || (source(last, end - 2) < axis.source_size &&
                                   (one_tap || source(last - 1, end - 1) < axis.source_size)));
    };
    const int64_t outputs = (axis.out_size - 1 - phase) / phases + 1;
    for (int64_t begin = 0, end; begin < outputs; begin = end) {
      end = padded ? outputs : begin + 1;
      while (end < outputs && reads_image(begin, end + 1)) {
        ++end;
      }
      // Equal block sizes, overlapping if necessary: one code path, no branch mispredictions.
      const int64_t count = (end - begin + max_outputs - 1) / max_outputs;
      const int64_t size = (end - begin + count - 1) / count;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = begin + i * (end - begin - size) / std::max<int64_t>(1, count - 1);
        blocks.push_back(block(at, at + size));
        extra_in_place = extra_in_place || blocks.back().pads_first || blocks.back().pads_last;
        if (padded && blocks.back().tap_begin < blocks.back().tap_end) {
          left = std::max(left, -source(blocks.back().tap_begin, at));
          width = std::max(width, source(blocks.back().tap_end - 1, at + size - 1) + 1);
        }
      }
    }
  }
};

// Bands of output rows, each computed as an image of its own. Row h of band b is row
// h + b · out_rows of the image. Source row h of band b is row h + b · source_rows − above of the
// image; rows outside the image are zero.
struct Bands {
  int64_t count = 1;              // per image
  int64_t out_rows, source_rows;  // from one band to the next
  int64_t above = 0;              // source rows of band 0 above the image
  Axis axis;                      // vertical axis of a band

  Bands(const Axis& image, int64_t max_bands)
      : out_rows(image.out_size), source_rows(0), axis(image) {
    // Input gradient: bands are a multiple of the stride, so that all have the same tap phases.
    const int64_t unit = image.transposed ? image.stride : 1;
    const int64_t units = (image.out_size + unit - 1) / unit;
    const int64_t rows = (units + max_bands - 1) / std::max<int64_t>(1, max_bands) * unit;
    if (max_bands <= 1 || rows >= image.out_size) {
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

// Assignment of lanes: lane i · channels + c holds channel c of image (or band of an image) i.
// Lanes without an image or channel are idle.
struct LaneLayout {
  // Lanes that one pass over a row computes: 1 or 2 vectors; in place, all C channels (in the
  // weight gradient rounded up to whole vectors).
  int64_t count;
  int64_t channels, images;  // of a group: channels · images (or bands) ≤ count
  Bands bands;
  int64_t channel_groups, image_groups;  // groups of lanes that cover all channels, all images

  LaneLayout(const Geometry& g, const Axis& vertical, int64_t count)
      : count(count),
        channels(std::min(g.c, count)),
        images(count / channels),
        bands(vertical, images / std::max<int64_t>(1, g.n)),
        channel_groups((g.c + channels - 1) / channels),
        image_groups((g.n * bands.count + images - 1) / images) {}
};

// Strided view of an image tensor by lane. Sizes and strides are in elements.
template <typename T>
struct LaneView {
  // Address of row 0 of the image or band (may lie before the image, see valid_mask); NCHW: one per
  // active lane, NHWC: one per active image or band.
  T* base[kMaxLanes];
  int64_t count;                     // of `base`
  int64_t channels;                  // active, per image
  int64_t width;                     // pixels of a row
  int64_t row_stride, pixel_stride;  // pixel_stride is 0 for NCHW
  int64_t prefetch_rows;             // rows h < prefetch_rows are prefetched
  int64_t group_stride;              // NCHW: to the same lane of the next group of channels
  bool has_bands;
  int64_t first_row[kMaxLanes];  // with bands: row of the image at `base`
  int64_t height;                // of the image

  // Return a mask with bit i set if row h of base[i] is in the image.
  uint32_t valid_mask(int64_t h) const {
    uint32_t bits = UINT32_MAX >> (kMaxLanes - count);
    for (int64_t i = 0; has_bands && i < count; ++i) {
      const bool inside = h + first_row[i] >= 0 && h + first_row[i] < height;
      bits &= ~(uint32_t{!inside} << i);
    }
    return bits;
  }
};

template <typename T>
struct ImageTensor {
  T* data;
  int64_t height, width;
  int64_t stride_n, stride_c;  // between images and between channels, in elements
};

template <typename T>
ImageTensor<const T> input_tensor(const Geometry& g, const T* x) {
  return {x, g.h, g.w, g.input_n, g.input_c};
}

template <typename T>
ImageTensor<T> dense_tensor(const Geometry& g, T* data, int64_t height, int64_t width) {
  const auto strides = image_strides(g.channels_last, g.c, height, width);
  return {data, height, width, strides.n, strides.c};
}

// Return the addresses of the lanes of a group, of sources or of outputs.
template <typename T>
LaneView<T> lane_view(const Geometry& g, const LaneLayout& lanes, const ImageTensor<T>& images,
                      int64_t image_group, int64_t channel_group, bool sources) {
  const int64_t n = image_group * lanes.images, c = channel_group * lanes.channels;
  const int64_t channels = std::min(lanes.channels, g.c - c), width = images.width;
  const int64_t bands = lanes.bands.count;
  LaneView<T> p{{},        0,  channels,     width, width, 0, 0, lanes.channels * images.stride_c,
                bands > 1, {}, images.height};
  if (g.channels_last) {
    p.row_stride = width * g.c;
    p.pixel_stride = g.c;
    if (g.c * sizeof(T) > kCacheLine) {  // else the hardware prefetcher follows
      p.prefetch_rows = images.height;
    }
  }
  for (int64_t i = n; i < std::min(n + lanes.images, g.n * bands); ++i) {
    for (int64_t j = c; j < (g.channels_last ? c + 1 : c + channels); ++j) {
      p.first_row[p.count] = sources ? i % bands * lanes.bands.source_rows - lanes.bands.above
                                     : i % bands * lanes.bands.out_rows;
      p.base[p.count] = images.data + i / bands * images.stride_n + j * images.stride_c;
      p.base[p.count] += p.first_row[p.count] * p.row_stride;
      ++p.count;
    }
  }
  return p;
}

// Filter rows that read a valid source row.
struct ValidRows {
  int64_t count;
  int64_t last;  // last source row that they read
};

// Source rows in the ring, or in the image if `in_place`: `count` rows of `size` elements. Row h is
// in slot h % count.
struct SourceRows {
  int64_t count, size;
};

// Zero-initialised buffers of a thread: a ring of source rows and one row of outputs.
template <typename A>
class Workspace {
 public:
  std::vector<Tap> filter_rows;  // offsets of the weights and the source row of each

  Workspace(int64_t taps, int64_t ring_size, int64_t row_size)
      : filter_rows(taps),
        ring_size_(ring_size),
        memory_(ring_size + row_size + kCacheLine / sizeof(A)) {}

  A* ring() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (kCacheLine - address % kCacheLine) % kCacheLine / sizeof(A);
  }
  A* row() { return ring() + ring_size_; }

  // List the valid filter rows of output row h. A filter row has weight_row elements.
  ValidRows find_rows(const Axis& vertical, int64_t h, int64_t weight_row, SourceRows sources) {
    ValidRows found{0, -1};
    for (int64_t tap = 0; tap < vertical.taps; ++tap) {
      const int64_t at = vertical.source(h, tap);
      if (at >= 0) {
        found.last = std::max(found.last, at);
        filter_rows[found.count++] = {tap * weight_row, at % sources.count * sources.size};
      }
    }
    return found;
  }

 private:
  int64_t ring_size_;
  std::vector<A> memory_;
};

// Arguments of the kernel `correlate`: forward pass or input gradient.
template <typename T>
struct Correlation {
  using A = acc_t<T>;

  const Geometry& g;
  LaneLayout lanes;
  RowPlan row_plan;
  SourceRows source_rows;
  int64_t vectors;  // SIMD vectors per output of a register block
  bool in_place;    // read sources in place (channels-last); lanes are all channels of a pixel
  ImageTensor<const T> source;
  const A *weight, *bias;  // [channel group][tap][lane], [channel group][lane]
  ImageTensor<T> out;
};

}  // namespace ops::depthwise_conv2d
