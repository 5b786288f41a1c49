// Tiles of nhwc_mma: some rows of kTileChannels channels of an image, or those channels of several
// images. A tile lies in shared memory twice: as in the image, channels beside each other, and
// transposed into feature maps with zeros around them.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/nchw_stage.cuh"

namespace ops::cuda {

constexpr int kTileChannels = 16;
constexpr int kWarpChannels = 2;  // of a warp, which has them to itself
constexpr int kNhwcMmaThreads = 32 * kTileChannels / kWarpChannels;
constexpr int kNhwcMmaBlocks = 2;                      // on a multiprocessor
constexpr int kUnitChannels = 8;                       // 16 bytes: what moves at once
constexpr int kUnits = kTileChannels / kUnitChannels;  // of a position

// One side of the convolution.
struct TileSide {
  int h, w;
  int bytes;  // of shared memory for what is loaded
  int rows;   // of a map
  int left;   // words of a row before the first column
  int words;  // of a row that are written
  FastDivide by_words{1}, by_lines{1};
};

struct NhwcMmaParams {
  NchwParams map;  // of it sizes, starts, and how an image is cut into bands
  TileSide in, out;
  int channels;
  int chunks;         // of kTileChannels channels
  int images, group;  // in all, and of a tile: more than one only where bands is 1
  int tiles;          // of a chunk
};

// The images and rows of a tile.
struct ImageTile {
  int image, images;
  StageRange range;
};

// What a block has to do: a part of the tiles of a chunk of channels.
struct BlockWork {
  int split;           // which part
  int first, present;  // channels

  __device__ explicit BlockWork(const NhwcMmaParams& params)
      : split(blockIdx.x / params.chunks),
        first(blockIdx.x % params.chunks * kTileChannels),
        present(min(kTileChannels, params.channels - first)) {}
};

// Goes from one tile of a block to its next, without a division: blocks take turns.
template <typename Axis, int kRows>
class TileIterator {
 public:
  __device__ TileIterator(const NhwcMmaParams& params, const BlockWork& place)
      : params_(params),
        stride_(gridDim.x / params.chunks),
        image_stride_(stride_ / params.map.bands * params.group),
        band_stride_(stride_ % params.map.bands),
        tile_(place.split),
        image_(tile_ / params.map.bands * params.group),
        band_(tile_ % params.map.bands) {}

  __device__ bool any() const { return tile_ < params_.tiles; }
  __device__ ImageTile tile() const {
    return {image_, min(params_.group, params_.images - image_),
            StageRange::at<Axis, kRows>(params_.map, 0, 1, band_)};
  }
  __device__ void advance() {
    tile_ += stride_, image_ += image_stride_, band_ += band_stride_;
    if (band_ >= params_.map.bands) {
      band_ -= params_.map.bands, image_ += params_.group;
    }
  }

 private:
  const NhwcMmaParams& params_;
  int stride_, image_stride_, band_stride_;
  int tile_, image_, band_;
};

// Feature maps in shared memory, in words: rows of all channels, of as many columns as windows of
// kColumns outputs take. 16 bytes are aligned, and lanes do not meet in banks, whether they go
// through the columns, through 16 bytes of each of eight rows, or through the columns of two units.
template <int kColumns>
struct TransposedLines {
  static constexpr int kWords = kColumns / 2 + 4;
  static constexpr int kLine = kTileChannels * kWords + 16 * kUnits + 4;

  __device__ static constexpr int channel(int c) { return c * kWords + c / kUnitChannels * 16; }
};

// A block's channels of images on one side. A row of their maps is a line of shared memory.
template <int kColumns, typename T>
class TileImages {
 public:
  using Lines = TransposedLines<kColumns>;
  static constexpr int kLine = Lines::kLine;

  __device__ TileImages(const NhwcMmaParams& params, const TileSide& side, const BlockWork& place,
                        T* data)
      : data_(data + place.first),
        side_(side),
        channels_(params.channels),
        present_(place.present) {}

  // Words before the map of a channel of an image.
  __device__ int map(int channel, int image) const {
    return image * side_.rows * kLine + Lines::channel(channel);
  }

  // Begins to copy `rows` rows, from `row` on, of images to shared memory.
  __device__ void load(uint4* staged, int image, int images, int row, int rows) const {
    const int unit = threadIdx.x % kUnits, first = threadIdx.x / kUnits;
    if (unit * kUnitChannels >= present_) {
      return;
    }
    const T* from = position(image, row, first) + unit * kUnitChannels;
    const int units = images * rows * side_.w * kUnits;
    staged += place(threadIdx.x);  // it moves unit i + kNhwcMmaThreads as it moves unit i
    for (int i = threadIdx.x; i < units; i += kNhwcMmaThreads) {
      __pipeline_memcpy_async(staged, from, sizeof(uint4));
      staged += kNhwcMmaThreads, from += kNhwcMmaThreads / kUnits * channels_;
    }
  }

  // Turns what has been loaded, rows from `loaded` on, into maps that begin with row `first` of
  // the images; rows outside of them are zero.
  __device__ void turn(const uint4* staged, unsigned* maps, int images, int loaded, int rows,
                       int first) const {
    constexpr int kWarps = kNhwcMmaThreads / 32 / kUnits;  // that go through positions side by side
    const unsigned warp = threadIdx.x / 32, unit = warp % kUnits;
    const unsigned pairs = images * side_.rows * side_.words;
    maps += Lines::channel(unit * kUnitChannels) + side_.left;
    for (unsigned pair = warp / kUnits * 32 + threadIdx.x % 32; pair < pairs; pair += 32 * kWarps) {
      const int line = side_.by_words(pair), image = side_.by_lines(line);
      const int word = pair - line * side_.words, col = 2 * word;
      const int row = first + line - image * side_.rows;
      const unsigned last =
          static_cast<unsigned>(row) < static_cast<unsigned>(side_.h) ? side_.w : 0;
      const int at = ((image * rows + row - loaded) * side_.w + col) * kUnits + unit;
      uint4 even{}, odd{};
      if (static_cast<unsigned>(col) < last) {
        even = staged[place(at)];
      }
      if (static_cast<unsigned>(col + 1) < last) {
        odd = staged[place(at + kUnits)];
      }
      unsigned* to = maps + line * kLine + word;
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

  // Turns `rows` rows of maps back, into images from `row` on.
  __device__ void store(const unsigned* maps, int image, int images, int row, int rows) const {
    const int unit = threadIdx.x % kUnits;
    if (unit * kUnitChannels >= present_) {
      return;
    }
    T* const to = position(image, row, 0) + unit * kUnitChannels;
    const unsigned pairs = images * rows * side_.words;
    maps += Lines::channel(unit * kUnitChannels) + side_.left;
    for (unsigned pair = threadIdx.x / kUnits; pair < pairs; pair += kNhwcMmaThreads / kUnits) {
      const int line = side_.by_words(pair), i = side_.by_lines(line);
      const int col = pair - line * side_.words;
      const unsigned* from = maps + (line + i * (side_.rows - side_.h)) * kLine + col;
      unsigned even[4], odd[4];
#pragma unroll
      for (int c = 0; c < kUnitChannels; c += 2) {
        const unsigned left = from[c * Lines::kWords], right = from[(c + 1) * Lines::kWords];
        even[c / 2] = __byte_perm(left, right, 0x5410);
        odd[c / 2] = __byte_perm(left, right, 0x7632);
      }
      T* positions = to + (line * side_.w + 2 * col) * static_cast<int64_t>(channels_);
      // By name, as the compiler left to itself stores word by word.
      __stwb(reinterpret_cast<uint4*>(positions), make_uint4(even[0], even[1], even[2], even[3]));
      if (2 * col + 1 < side_.w) {
        __stwb(reinterpret_cast<uint4*>(positions + channels_),
               make_uint4(odd[0], odd[1], odd[2], odd[3]));
      }
    }
  }

 private:
  T* data_;
  const TileSide& side_;
  int channels_, present_;

  __device__ T* position(int image, int row, int i) const {
    return data_ + ((static_cast<int64_t>(image) * side_.h + row) * side_.w + i) * channels_;
  }
  // Where the i-th unit of a staged tile lies: so that neither neighbouring units meet in a bank
  // nor the same ones of every second position.
  __device__ static unsigned place(unsigned i) { return i ^ (i / (4 * kUnits) % 4); }
};

inline TileSide side(int h, int w, int bytes, int rows, int left, int words, int lines) {
  return {h, w, bytes, rows, left, words, FastDivide(words), FastDivide(lines)};
}

struct NhwcMmaPlan {
  NhwcMmaParams params;
  int splits;  // blocks of a chunk
  size_t shared;

  int blocks() const { return splits * params.chunks; }
};

// How to cut images into shared-memory tiles for warp tiles of kRows rows, with maps for at most
// kColumns columns of outputs. Feature maps of outputs take the place of inputs, or, where `apart`,
// lie behind them. Nothing where blocks would be too large.
template <typename Axis, int kRows, int kColumns>
std::optional<NhwcMmaPlan> plan_nhwc_mma(int64_t images, int64_t channels, int64_t in_h,
                                         int64_t in_w, int64_t out_h, int64_t out_w,
                                         int64_t padding_h, int64_t padding_w, bool apart) {
  const Device device;
  const size_t room = std::min(device.block_shared, device.shared / kNhwcMmaBlocks - 1024);
  const int resident_blocks = kNhwcMmaBlocks * device.multiprocessors;
  std::optional<NhwcMmaPlan> best;
  int64_t least = 0;
  const auto consider = [&](int64_t bands, int64_t group) {
    NhwcMmaParams params{};
    NchwParams& map = params.map;
    map.in_h = in_h, map.in_w = in_w, map.out_h = out_h, map.out_w = out_w;
    map.start_h = Axis::start(padding_h), map.start_w = Axis::start(padding_w);
    map.down = ceil_div(ceil_div(out_h, kRows), bands);
    map.bands = ceil_div(ceil_div(out_h, kRows), map.down);
    params.channels = channels, params.chunks = ceil_div(channels, kTileChannels);
    params.images = images, params.group = group;
    params.tiles = ceil_div(images, group) * map.bands;
    const int64_t rows = map.down * kRows;
    const int64_t window = Axis::inputs(rows);
    const int64_t in_rows = map.bands == 1 ? in_h : std::min(in_h, window);
    const int64_t left = (padding_w + 1) / 2, out_words = ceil_div(out_w, 2);
    const int64_t in_words = ceil_div(in_w, 2);
    const int64_t words = apart ? in_words : std::max(in_words, out_words);
    const auto bytes = [&](int64_t positions) -> int {
      constexpr int kTurn = 8;  // positions that TileImages::place moves among themselves
      return ceil_div(group * positions, kTurn) * kTurn * kUnits * sizeof(uint4);
    };
    params.in = side(in_h, in_w, bytes(in_rows * in_w), window, left, words, window);
    params.out =
        apart ? side(out_h, out_w, bytes(std::min(out_h, rows) * out_w), rows, 0, out_words, rows)
              : side(out_h, out_w, 0, window, left, out_words, out_h);
    using Lines = TransposedLines<kColumns>;
    constexpr size_t kLineBytes = Lines::kLine * sizeof(unsigned);
    const size_t shared =
        params.in.bytes + params.out.bytes + group * (window + (apart ? rows : 0)) * kLineBytes;
    if (shared > room || left + words > Lines::kWords) {
      return;
    }
    int64_t splits = std::clamp<int64_t>(resident_blocks / params.chunks, 1, params.tiles);
    while (std::gcd(splits, int64_t{map.bands}) > 1) {
      --splits;  // or a block would have the same band of all its images: the last has less to do
    }
    constexpr int64_t kLatency = 1000;  // of a tile, in positions
    const int64_t cost = ceil_div(splits * params.chunks, resident_blocks) *
                         ceil_div(params.tiles, splits) *
                         (group * (window * in_w + rows * out_w) + kLatency);
    if (!best || cost < least) {
      best = NhwcMmaPlan{params, static_cast<int>(splits), shared}, least = cost;
    }
  };
  if (padding_w < 0 || padding_w > kMaxPadding) {
    return std::nullopt;
  }
  for (int64_t group = 1; group <= std::min<int64_t>(images, 16); ++group) {
    consider(1, group);
  }
  for (int64_t bands = 2; bands <= ceil_div(out_h, kRows); ++bands) {
    consider(bands, 1);
  }
  return best;
}

}  // namespace ops::cuda
