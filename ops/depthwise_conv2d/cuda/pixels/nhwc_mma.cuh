// Tiles of nhwc_mma, the choice of their size, and the copies of their input windows to shared
// memory.
#pragma once

#include "core/cuda/copy.cuh"
#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::depthwise_conv2d {

constexpr int kMmaSlots = 4;      // tiles at a time, each with its own warps
constexpr int kSlotChannels = 8;  // 16 bytes
constexpr int kMmaRows = 7;       // output rows per warp, at most
constexpr int kMmaColumns = 16;   // output columns that a warp computes at once
// Most columns of a tail, the rest of a tile: the slot's first warp computes the rows of both.
constexpr int kTailColumns = 8;
constexpr int kMmaThreads = 512;  // per SM: limited by the registers of the filter

// Output rows per warp of lower bands.
constexpr int low_rows(int taps) {
  return taps == 7 ? 6 : 5;
}

// Return the output rows per warp with the least estimated time, in rows: computed ones, and the
// halo, of which a row costs a third.
inline int64_t choose_rows(int64_t out_h, int taps) {
  Cheapest<int64_t> rows_of_warp;
  for (const int64_t rows : {kMmaRows, low_rows(taps)}) {
    rows_of_warp.offer(rows, ceil_div(out_h, 2 * rows) * (rows + (taps - 1) / 3.0));
  }
  return *rows_of_warp.best();
}

// Return the tile's columns (even, at most 32) with the least estimated time. The times of 16
// columns, of a tail and of the copies were measured on an H200.
inline int choose_tile_columns(int64_t out_w, int64_t all_bands, int64_t slots, bool tails) {
  constexpr int64_t kColumnsTime = 20, kTailTime = 12, kCopyTime = 5;
  Cheapest<int> columns_of_tile;
  for (int64_t tiles = ceil_div(out_w, 32); tiles <= ceil_div(out_w, kTailColumns); ++tiles) {
    const int64_t columns = round_up(ceil_div(out_w, tiles), 2), last = columns % kMmaColumns;
    const bool tail = tails && last > 0 && last <= kTailColumns;
    const int64_t full = columns / kMmaColumns + (last > 0 && !tail ? 1 : 0);
    const int64_t share = ceil_div(all_bands * ceil_div(out_w, columns), slots);
    const int64_t time = share * (full * kColumnsTime + (tail ? kTailTime : 0) + kCopyTime);
    columns_of_tile.offer(columns, time);
  }
  return *columns_of_tile.best();
}

struct NhwcMmaParams {
  int h, w, out_h, out_w, channels;
  int start_h, start_w;  // input coordinates of the first output's window
  int chunks;            // of kSlotChannels channels
  int bands;             // of rows
  int tiles_w;           // tiles along a row
  int tile_columns;      // even
  int tail;              // first column of the tail; tile_columns: there is none
  int tiles;             // per chunk
  int splits;            // slots of the grid with the same channels
  int share;             // tiles of a slot
  bool flip;
};

// Channels and first tile of a slot (p.tiles: idle). Adjacent slots have adjacent channels.
struct NhwcMmaSlot {
  int channel, tile;

  __device__ NhwcMmaSlot(const NhwcMmaParams& p, int slot_in_block) {
    const int slot = blockIdx.x * kMmaSlots + slot_in_block, split = slot / p.chunks;
    channel = (slot - split * p.chunks) * kSlotChannels;
    tile = split < p.splits ? split : p.tiles;
  }
};

struct NhwcMmaTile {
  int image, row, col;  // first output

  __device__ NhwcMmaTile(const NhwcMmaParams& p, int index, int band_rows) {
    col = index % p.tiles_w * p.tile_columns;
    index /= p.tiles_w;
    row = index % p.bands * band_rows;
    image = index / p.bands;
  }
};

// Layout of a window, in vectors of 8 channels: [row][pixel parity][pixel pair]. Pairs are adjacent
// for ldmatrix; the halves of a row, and the windows of adjacent slots, are shifted to other banks.
// kRowWarps warps share a window, each with kRows output rows.
template <int K, int kRows, int kColumns, int kRowWarps>
struct NhwcMmaWindow {
  static constexpr int kHalf = kColumns / 2 + 4, kPitch = 2 * kHalf;
  static constexpr int kHalo = K - 1, kBandRows = kRowWarps * kRows;
  static constexpr int kHeight = kBandRows + kHalo, kSize = kHeight * kPitch + 1;
  static constexpr size_t kBytes = kMmaSlots * kSize * sizeof(uint4);
  static_assert(kHalf % 8 == 4 && kRowWarps <= 2);

  static __device__ int column(int x) { return x % 2 * kHalf + x / 2; }

  // Return the index of output (y, x) in the window: over inputs that no warp still reads. In the
  // tail the second warp's rows are 4 pixel pairs to the right of the first's.
  static __device__ int output(const NhwcMmaParams& p, int y, int x) {
    const int second = x < p.tail ? kHalo * kPitch : kTailColumns / 2 - kRows * kPitch;
    return y * kPitch + column(x) + (kRowWarps == 1 || y < kRows ? 0 : second);
  }
};

// Pixel of a copying thread: kMmaSlots adjacent threads have the same pixel of the slots' tiles.
template <int kThreads, int kColumns>
struct NhwcMmaThread {
  static constexpr int kStep = kThreads / kMmaSlots / kColumns;  // rows
  static_assert(kStep > 0);
  int slot = threadIdx.x % kMmaSlots;
  int x = threadIdx.x / kMmaSlots % kColumns, y = threadIdx.x / kMmaSlots / kColumns;
};

// Copies of the windows of a slot's tiles. A thread copies every kStep-th row of a column.
template <typename Layout, int kThreads, typename T>
class NhwcMmaCopies {
 public:
  __device__ NhwcMmaCopies(const NhwcMmaParams& p, const T* in, int channel)
      : p_(p), in_(in), channel_(channel) {}

  // Prepare the copies of tile `index` to `windows`.
  __device__ void start(int index, uint4* windows) {
    const Thread at;
    rows_ = 0;
    if (index < p_.tiles && at.x < Layout::kPitch) {
      const NhwcMmaTile tile(p_, index, Layout::kBandRows);
      const int w = tile.col + p_.start_w + at.x;
      rows_ = Layout::kHeight - at.y;
      h_ = tile.row + p_.start_h + at.y;
      inside_ = at.x < p_.tile_columns + Layout::kHalo && is_inside(w, p_.w);
      from_ = in_ + ((static_cast<int64_t>(tile.image) * p_.h + h_) * p_.w + w) * p_.channels +
              channel_;
      to_ = windows + at.slot * Layout::kSize + at.y * Layout::kPitch + Layout::column(at.x);
    }
  }
  // Return whether copies remain.
  __device__ bool remain() const { return rows_ > 0; }

  // Issue the copy of the next row; zeros outside the image.
  __device__ void issue() {
    if (remain()) {
      const bool inside = inside_ && is_inside(h_, p_.h);
      copy_async_or_zero(shared_address(to_), inside ? from_ : in_, inside);
      from_ += static_cast<int64_t>(Thread::kStep) * p_.w * p_.channels;
      to_ += Thread::kStep * Layout::kPitch;
      h_ += Thread::kStep, rows_ -= Thread::kStep;
    }
  }

 private:
  using Thread = NhwcMmaThread<kThreads, (Layout::kPitch > 32 ? 64 : 32)>;

  const NhwcMmaParams& p_;
  const T* in_;
  int channel_;
  const T* from_;
  uint4* to_;
  int h_, rows_ = 0;
  bool inside_;
};

}  // namespace ops::depthwise_conv2d
