// Tiles of the NHWC weight gradient on matrix units, and their plan. A tile is kTileChannels
// channels of a band of rows of one image, or of several whole images. Shared memory has it twice:
// as loaded, [row][col][channel], and transposed into zero-padded feature maps,
// [row][channel][col].
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/choose.h"
#include "core/cuda/copy.cuh"
#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/planes/nchw_stage.cuh"

namespace ops::cuda {

constexpr int kTileChannels = 16;
constexpr int kWarpChannels = 2;
constexpr int kTransposeThreads = 32 * kTileChannels / kWarpChannels;
constexpr int kTransposeBlocks = 2;                        // per SM
constexpr int kVectorChannels = 8;                         // channels of a 16-byte vector
constexpr int kVectors = kTileChannels / kVectorChannels;  // vectors per pixel of a tile

// Input or output of a tile. Words have 32 bits: two columns of one channel.
struct TileSide {
  int h, w;
  int bytes;                            // shared memory of the tile as loaded
  int rows;                             // per transposed map
  int left;                             // words of left padding
  int words;                            // per row, without padding
  FastDivide by_words{1}, by_lines{1};  // line: a row of one channel
};

struct TransposedParams {
  NchwParams map;  // in_h … start_w, tiles_h and bands are used
  TileSide in, out;
  int channels;
  int chunks;         // of kTileChannels channels
  int images, group;  // images of the batch; images per tile (1 unless there is one band)
  int tiles;          // per chunk
};

struct ImageTile {
  int image, images;
  Stage stage;
};

// A block's chunk of channels, and its split of the tiles.
struct BlockWork {
  int split;
  int first_channel, channel_count;

  __device__ explicit BlockWork(const TransposedParams& params)
      : split(blockIdx.x / params.chunks),
        first_channel(blockIdx.x % params.chunks * kTileChannels),
        channel_count(min(kTileChannels, params.channels - first_channel)) {}
};

// Iterator over the tiles of a block (grid-stride, without divisions).
template <typename Axis, int kRows>
class TileIterator {
 public:
  __device__ TileIterator(const TransposedParams& params, const BlockWork& work)
      : params_(params),
        stride_(gridDim.x / params.chunks),
        image_stride_(stride_ / params.map.bands * params.group),
        band_stride_(stride_ % params.map.bands),
        tile_(work.split),
        image_(tile_ / params.map.bands * params.group),
        band_(tile_ % params.map.bands) {}

  __device__ bool valid() const { return tile_ < params_.tiles; }
  __device__ ImageTile tile() const {
    return {image_, min(params_.group, params_.images - image_),
            Stage::at<Axis, kRows>(params_.map, 0, 1, band_)};
  }
  __device__ void advance() {
    tile_ += stride_, image_ += image_stride_, band_ += band_stride_;
    if (band_ >= params_.map.bands) {
      band_ -= params_.map.bands, image_ += params_.group;
    }
  }

 private:
  const TransposedParams& params_;
  int stride_, image_stride_, band_stride_;
  int tile_, image_, band_;
};

// Layout [row][channel][word] of transposed maps for up to kColumns outputs, in words. A product
// reads 8 words and their halo of 4. Rows are 16-byte aligned. The padding avoids bank conflicts:
// of warps that read along a row, and of the transposition, which touches two vectors at a time.
template <int kColumns>
struct TransposedLayout {
  static constexpr int kWords = kColumns / 2 + 4;
  static_assert(kColumns % 16 == 0);
  static constexpr int kPitch = kTileChannels * kWords + 16 * kVectors + 4;

  __device__ static constexpr int channel(int c) { return c * kWords + c / kVectorChannels * 16; }
};

// Copies of a block's channels from an image tensor (input or grad_output) to shared memory.
template <int kColumns, typename T>
class TileImages {
 public:
  using Lines = TransposedLayout<kColumns>;
  static constexpr int kPitch = Lines::kPitch;

  __device__ TileImages(const TransposedParams& params, const TileSide& side, const BlockWork& work,
                        T* data)
      : data_(data + work.first_channel),
        side_(side),
        channels_(params.channels),
        channel_count_(work.channel_count) {}

  // Return the offset of a channel's map, in words.
  __device__ int map(int channel, int image) const {
    return image * side_.rows * kPitch + Lines::channel(channel);
  }

  // Start to copy rows [row, row + rows) of the images to shared memory (cp.async).
  __device__ void load(uint4* staged, int image, int images, int row, int rows) const {
    const int vector = threadIdx.x % kVectors, first = threadIdx.x / kVectors;
    if (vector * kVectorChannels >= channel_count_) {
      return;
    }
    const T* from = address(image, row, first) + vector * kVectorChannels;
    const int vectors = images * rows * side_.w * kVectors;
    staged +=
        swizzle(threadIdx.x);  // swizzle(i + kTransposeThreads) = swizzle(i) + kTransposeThreads
    for (int i = threadIdx.x; i < vectors; i += kTransposeThreads) {
      copy_async<sizeof(uint4)>(shared_address(staged), from);
      staged += kTransposeThreads, from += kTransposeThreads / kVectors * channels_;
    }
  }

  // Transpose the staged rows [loaded, loaded + rows) to maps that begin at row first_row. Rows
  // outside the image become zero.
  __device__ void transpose(const uint4* staged, unsigned* maps, int images, int loaded, int rows,
                            int first_row) const {
    constexpr int kWarps = kTransposeThreads / 32 / kVectors;  // warps per vector
    const unsigned warp = threadIdx.x / 32, vector = warp % kVectors;
    const unsigned pairs = images * side_.rows * side_.words;
    maps += Lines::channel(vector * kVectorChannels) + side_.left;
    for (unsigned pair = warp / kVectors * 32 + threadIdx.x % 32; pair < pairs;
         pair += 32 * kWarps) {
      const int line = side_.by_words(pair), image = side_.by_lines(line);
      const int word = pair - line * side_.words, col = 2 * word;
      const int row = first_row + line - image * side_.rows;
      const unsigned last = is_inside(row, side_.h) ? side_.w : 0;
      const int at = ((image * rows + row - loaded) * side_.w + col) * kVectors + vector;
      uint4 even{}, odd{};
      if (static_cast<unsigned>(col) < last) {
        even = staged[swizzle(at)];
      }
      if (static_cast<unsigned>(col + 1) < last) {
        odd = staged[swizzle(at + kVectors)];
      }
      unsigned* to = maps + line * kPitch + word;
      const auto put = [&](int c, unsigned left, unsigned right) {
        to[c * Lines::kWords] = __byte_perm(left, right, 0x5410);
        to[(c + 1) * Lines::kWords] = __byte_perm(left, right, 0x7632);
      };
      put(0, even.x, odd.x);
      put(2, even.y, odd.y);
      put(4, even.z, odd.z);
      put(6, even.w, odd.w);
    }
  }

 private:
  T* data_;
  const TileSide& side_;
  int channels_, channel_count_;

  __device__ T* address(int image, int row, int i) const {
    return data_ + ((static_cast<int64_t>(image) * side_.h + row) * side_.w + i) * channels_;
  }
  // Return the index of staged vector i. The XOR swizzle avoids bank conflicts of loads (adjacent
  // vectors) and of the transposition (the same vector of every second pixel).
  __device__ static unsigned swizzle(unsigned i) { return i ^ (i / (4 * kVectors) % 4); }
};

inline TileSide side(int h, int w, int bytes, int rows, int left, int words, int lines) {
  return {h, w, bytes, rows, left, words, FastDivide(words), FastDivide(lines)};
}

struct TransposedPlan {
  TransposedParams params;
  int splits;  // blocks per chunk
  size_t shared;

  int blocks() const { return splits * params.chunks; }
};

// Choose the tile with the least estimated cost, for warp tiles of kRows rows and at most kColumns
// output columns. nullopt: no tile fits in shared memory.
template <typename Axis, int kRows, int kColumns>
std::optional<TransposedPlan> plan_transposed_tiles(const DepthwiseGeometry& g) {
  const Device device;
  const size_t shared_limit =
      std::min(device.block_shared, device.shared / kTransposeBlocks - 1024);
  const int resident_blocks = kTransposeBlocks * device.multiprocessors;
  Cheapest<TransposedPlan> plan;
  const auto offer = [&](int64_t bands, int64_t group) {
    TransposedParams params{};
    NchwParams& map = params.map;
    map.in_h = g.h, map.in_w = g.w, map.out_h = g.out_h, map.out_w = g.out_w;
    map.start_h = Axis::start(g.padding_h), map.start_w = Axis::start(g.padding_w);
    map.tiles_h = ceil_div(ceil_div(g.out_h, kRows), bands);
    map.bands = ceil_div(ceil_div(g.out_h, kRows), map.tiles_h);
    params.channels = g.c, params.chunks = ceil_div(g.c, kTileChannels);
    params.images = g.n, params.group = group;
    params.tiles = ceil_div(g.n, group) * map.bands;
    const int64_t rows = map.tiles_h * kRows;
    const int64_t window = Axis::inputs(rows);
    const int64_t in_rows = map.bands == 1 ? g.h : std::min(g.h, window);
    const int64_t left = (g.padding_w + 1) / 2, in_words = ceil_div(g.w, 2);
    const auto bytes = [&](int64_t pixels) -> int {
      constexpr int kSwizzle = 8;  // pixels permuted by TileImages::swizzle
      return ceil_div(group * pixels, kSwizzle) * kSwizzle * kVectors * sizeof(uint4);
    };
    params.in = side(g.h, g.w, bytes(in_rows * g.w), window, left, in_words, window);
    params.out = side(g.out_h, g.out_w, bytes(std::min(g.out_h, rows) * g.out_w), rows, 0,
                      ceil_div(g.out_w, 2), rows);
    using Lines = TransposedLayout<kColumns>;
    constexpr size_t kPitchBytes = Lines::kPitch * sizeof(unsigned);
    const size_t shared =
        params.in.bytes + params.out.bytes + group * (window + rows) * kPitchBytes;
    if (shared > shared_limit || left + in_words > Lines::kWords) {
      return;
    }
    int64_t splits = std::clamp<int64_t>(resident_blocks / params.chunks, 1, params.tiles);
    while (std::gcd(splits, int64_t{map.bands}) > 1) {
      --splits;  // else some blocks have only last bands, which have fewer rows
    }
    constexpr int64_t kLatency = 1000;  // of a tile, as pixels computed in that time
    const int64_t cost = ceil_div(splits * params.chunks, resident_blocks) *
                         ceil_div(params.tiles, splits) *
                         (group * (window * g.w + rows * g.out_w) + kLatency);
    plan.offer({params, static_cast<int>(splits), shared}, cost);
  };
  if (g.padding_w > kMaxPadding) {
    return std::nullopt;
  }
  for (int64_t group = 1; group <= std::min<int64_t>(g.n, 16); ++group) {
    offer(1, group);
  }
  for (int64_t bands = 2; bands <= ceil_div(g.out_h, kRows); ++bands) {
    offer(bands, 1);
  }
  return plan.best();
}

}  // namespace ops::cuda
