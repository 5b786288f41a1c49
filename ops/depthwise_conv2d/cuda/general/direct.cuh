// direct_l1: index types, axes, block shape and parameters of its kernels.
#pragma once

#include <numeric>

#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::depthwise_conv2d {

// Indices are int where they fit (fits_32_bits), else int64_t. Height and width of a padded image
// are less than kLargestSize.
template <typename Index>
constexpr int64_t kLargestSize = int64_t{1} << (sizeof(Index) == sizeof(int) ? 28 : 44);
template <typename Index>
using DivideBy = std::conditional_t<sizeof(Index) == sizeof(int), FastDivide, Divide>;
constexpr int64_t kMostSums = int64_t{1} << 30;  // C (taps + 1), exclusive

// Return whether offsets within an image, a channel and the filters fit in 32 bits.
inline bool fits_32_bits(const Geometry& g) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t rows = g.h + 2 * g.padding_h, cols = g.w + 2 * g.padding_w;
  const int64_t channels = g.channels_last ? g.c : 1;
  return rows < kLargestSize<int> && cols < kLargestSize<int> && rows * cols < kLimit / channels &&
         g.n < kLimit && g.n * rows * cols < kLimit &&
         g.c * (g.kernel_h * g.kernel_w + 1) < kMostSums;
}

// One axis with a compile-time map (core/axis.h).
template <typename Map>
struct CompiledAxis : Map {
  using Index = int;
  static constexpr int taps = Map::kTaps, out_step = 1;
  int in, out;
  int first_in;  // input coordinate of the first output's window

  CompiledAxis(int64_t in_size, int64_t out_size, int64_t padding)
      : in(in_size), out(out_size), first_in(Map::start(padding)) {}
  __device__ static int by_out_step(int o) { return o; }
};

// One axis with a run-time map. With (tap, in) = start(o), output o is the sum over k of
// tap + k · tap_step times input in + k · in_step.
template <typename T>
struct RuntimeAxis {
  using Index = T;
  Index in, out, taps;
  Index stride, dilation, padding;
  bool transposed;
  Index tap_step, in_step;
  Index out_step, in_of_out;  // outputs out_step apart use the same taps, on inputs in_of_out apart
  Index before;               // quotient added to keep dividends positive
  DivideBy<Index> by_stride, by_in_step, by_tap_step, by_out_step;

  explicit RuntimeAxis(const Axis& axis)
      : in(axis.source_size),
        out(axis.out_size),
        taps(axis.taps),
        stride(std::min(axis.stride, kLargestSize<Index>)),  // equivalent to any larger stride
        dilation(axis.taps == 1 ? 1 : axis.dilation),        // unused with one tap
        padding(axis.padding),
        transposed(axis.transposed),
        tap_step(transposed ? stride / std::gcd(stride, dilation) : 1),
        in_step(transposed ? -dilation / std::gcd(stride, dilation) : dilation),
        out_step(transposed ? stride : 1),
        in_of_out(transposed ? 1 : stride),
        before(ceil_div(kLargestSize<Index>, stride)),
        by_stride(stride),
        by_in_step(std::abs(in_step)),
        by_tap_step(tap_step),
        by_out_step(out_step) {}

  struct Start {
    Index tap, in;
  };
  __device__ Start start(Index o) const {
    if (!transposed) {
      return {0, o * stride - padding};
    }
    const Index most = min(tap_step, taps);
    Index distance = o + padding;  // = input · stride + tap · dilation
    for (Index tap = 0; tap < most; ++tap, distance -= dilation) {
      const Index at = by_stride(distance + before * stride) - before;
      if (at * stride == distance) {
        return {tap, at};
      }
    }
    return {taps, 0};
  }
  // Advance `at` past taps on padding; return the number of taps inside the image.
  __device__ Index clip(Start& at) const {
    const Index outside = transposed ? at.in - (in - 1) : -at.in;  // inputs before the image
    if (outside > 0) {
      const Index skipped = by_in_step(outside + abs(in_step) - 1);
      at.tap += skipped * tap_step, at.in += skipped * in_step;
    }
    const Index inside = transposed ? at.in : in - 1 - at.in;  // inputs after this one
    if (inside < 0 || at.tap >= taps) {
      return 0;
    }
    return min(by_in_step(inside), by_tap_step(taps - 1 - at.tap)) + 1;
  }
};

// Return the number of tiles of kOutputs outputs, out_step apart, and the first output of one.
template <int kOutputs, typename Axis>
int64_t count_tiles(const Axis& axis) {
  const int64_t step = axis.out_step;
  return kOutputs == 1 ? axis.out : ceil_div(axis.out, kOutputs * step) * step;
}
template <int kOutputs, typename Axis, typename Index>
__device__ Index first_output(const Axis& axis, Index tile) {
  return kOutputs == 1 ? tile : tile + axis.by_out_step(tile) * (kOutputs - 1) * axis.out_step;
}

constexpr int kDirectThreads = 256;

// Return the most lanes of a block with a run-time geometry.
inline int64_t runtime_lanes(const Geometry& g) {
  return g.channels_last ? 32 : kDirectThreads;
}

// Shape of a block: lanes × groups threads; consecutive threads access consecutive addresses.
struct DirectThreads {
  bool channels_last;
  int lanes;   // threads along channels, V channels each
  int groups;  // threads along tiles of outputs

  // At most max_lanes lanes. NCHW: all threads of a warp have the same channel.
  DirectThreads(bool last, int64_t vectors, int64_t tiles, int64_t max_lanes)
      : channels_last(last) {
    if (channels_last) {
      lanes = ceil_div(vectors, ceil_div(vectors, max_lanes));
      groups = std::min<int64_t>(kDirectThreads / lanes, tiles);
    } else {
      groups = std::min<int64_t>(kDirectThreads, ceil_div(tiles, kWarp) * kWarp);
      lanes = std::min<int64_t>({kDirectThreads / groups, vectors, max_lanes});
    }
  }
  dim3 block() const { return channels_last ? dim3(lanes, groups) : dim3(groups, lanes); }
  __device__ int lane() const { return channels_last ? threadIdx.x : threadIdx.y; }
  __device__ int group() const { return channels_last ? threadIdx.y : threadIdx.x; }
};

template <typename Index>
struct Position {
  Index image, row, col;
};

template <typename Index>
struct DirectStrides {
  int64_t n;
  Index c, h, w;

  DirectStrides(const Geometry& g, int64_t height, int64_t width) {
    const auto strides = image_strides(g.channels_last, g.c, height, width);
    n = strides.n, c = strides.c, h = strides.h, w = strides.w;
  }
  __device__ int64_t offset(const Position<Index>& at) const {
    return at.image * n + static_cast<int64_t>(at.row) * h + static_cast<int64_t>(at.col) * w;
  }
};

// Parameters of a kernel whose threads compute Tile::kImages × kRows × kCols outputs of
// Tile::kChannels channels at a time. A block has a range of the tiles of all images.
template <typename Tile>
struct DirectParams {
  using Axis = typename Tile::Axis;
  using Index = typename Axis::Index;
  Axis rows, cols;
  DirectStrides<Index> in, out;  // weight gradient: `out` is the output gradient
  Index images, channels;
  Index tile_rows, tile_cols, tiles;  // of an image; of a channel of all images
  DivideBy<Index> by_tile_rows, by_tile_cols;
  DirectThreads threads;
  Index chunks;  // blocks along channels
  Index share;   // tiles per block

  DirectParams(const Geometry& g, const Axis& r, const Axis& c, int64_t max_lanes)
      : rows(r),
        cols(c),
        in(g, r.in, c.in),
        out(g, r.out, c.out),
        images(g.n),
        channels(g.c),
        tile_rows(count_tiles<Tile::kRows>(r)),
        tile_cols(count_tiles<Tile::kCols>(c)),
        tiles(ceil_div(g.n, Tile::kImages) * tile_rows * tile_cols),
        by_tile_rows(tile_rows),
        by_tile_cols(tile_cols),
        threads(g.channels_last, ceil_div(g.c, Tile::kChannels), tiles, max_lanes),
        chunks(ceil_div(g.c, int64_t{threads.lanes} * Tile::kChannels)) {}

  // Divide the tiles among at most `most` blocks; return their number.
  int64_t divide(int64_t most) {
    const int64_t turns = ceil_div(tiles, threads.groups);  // tiles per thread
    share = threads.groups * ceil_div(turns, std::max<int64_t>(1, most));
    return ceil_div(tiles, share);
  }

  // Return the space in shared memory for one tap of the block's channels.
  __host__ __device__ int filter_pitch() const { return (threads.lanes + 1) * Tile::kChannels; }

  // Return the first output of a tile.
  __device__ Position<Index> first(Index tile) const {
    const Index line = by_tile_cols(tile), image = by_tile_rows(line);
    return {image * Tile::kImages, first_output<Tile::kRows>(rows, line - image * tile_rows),
            first_output<Tile::kCols>(cols, tile - line * tile_cols)};
  }
};

// Load V channels of each of kCols adjacent columns to x; padding is zero.
template <int kCols, int V, typename T>
__device__ void load_row(const T* position, bool row_inside, int column, int width, int stride,
                         float (&x)[kCols][V]) {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  Bits bits[kCols] = {};
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    if (row_inside && is_inside(column + i, width)) {
      bits[i] = *reinterpret_cast<const Bits*>(position + i * stride);
    }
  }
  widen<T>(bits, x);
}

// Call multiply(q, j, tap, x) for each output (q, j) of a tile and each of its taps, which reads
// the V channels x.
template <typename Tile, typename T, typename F>
__device__ __forceinline__ void for_each_product(const DirectParams<Tile>& params,
                                                 const Position<int>& at, const T* in,
                                                 const F& multiply) {
  using Map = typename Tile::Map;
  constexpr int kInRows = Map::inputs(Tile::kRows), kInCols = Map::inputs(Tile::kCols);
  const int y = params.rows.first_in + Map::step(at.row);
  const int left = params.cols.first_in + Map::step(at.col);
  in += params.in.offset({at.image, y, left});
#pragma unroll
  for (int r = 0; r < kInRows; ++r, in += params.in.h) {
    float x[kInCols][Tile::kChannels];
    load_row(in, is_inside(y + r, params.rows.in), left, params.cols.in, params.in.w, x);
    for_each_tap<Map, Tile::kRows, Tile::kCols>(
        r, [&](int q, int j, int tap, int i) { multiply(q, j, tap, x[i]); });
  }
}

}  // namespace ops::depthwise_conv2d
