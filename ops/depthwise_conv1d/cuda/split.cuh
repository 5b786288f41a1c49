// Division of the work of the kernels into blocks, and of sums into splits.
#pragma once

#include "core/cuda/divide.cuh"
#include "depthwise_conv1d/cuda/loads.cuh"

namespace ops::depthwise_conv1d {

// Return the number of threads along the channels: a power of two, at most 32.
inline int lanes_of(int64_t channels, int width) {
  int lanes = 32;
  while (lanes / 2 * width >= channels) {
    lanes /= 2;
  }
  return lanes;
}

// Return the number of blocks of a kernel that the device runs at once.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, size_t shared) {
  if (shared > kSharedBytes) {  // as launch_kernel
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared)));
  }
  int blocks = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared));
  return int64_t{Device::attribute(cudaDevAttrMultiProcessorCount)} * std::max(1, blocks);
}

// Return the part of the time in which `blocks` blocks keep the device busy.
inline double occupied(int64_t blocks, int64_t resident) {
  return static_cast<double>(blocks) / (ceil_div(blocks, resident) * resident);
}

// Return the number of splits of `blocks` blocks each, from `least` to `most`, that keep the device
// busy, in as few waves of blocks as possible.
inline int64_t choose_splits(int64_t blocks, int64_t resident, int64_t least, int64_t most) {
  constexpr int64_t kMaxWaves = 16;
  constexpr double kBusy = 0.93;
  int64_t best = least;
  for (int64_t waves = ceil_div(least * blocks, resident); waves <= kMaxWaves; ++waves) {
    const int64_t splits = std::clamp(waves * resident / blocks, least, most);
    if (occupied(splits * blocks, resident) > occupied(best * blocks, resident)) {
      best = splits;
    }
    if (occupied(best * blocks, resident) >= kBusy) {
      break;
    }
  }
  return best;
}

constexpr int64_t kMaxGridY = 65535;  // blocks along y and z

// Return the number of `units` that each block takes, for `most` blocks per multiprocessor.
inline int64_t share(int64_t units, int64_t blocks, int64_t most) {
  const int64_t all = Device::attribute(cudaDevAttrMultiProcessorCount) * most;
  return ceil_div(units, std::clamp<int64_t>(all / blocks, 1, units));
}

// Units of work along T: `length` positions of one image and phase (position modulo the dilation).
struct Units {
  int count, per_split, per_phase, length;
};

// Divide `positions` of each phase into units for blocks of `rows` units at a time, and the units
// into splits; `blocks`: number of blocks of a split; `resident`: of blocks at once. nullopt: too
// many.
inline std::optional<Units> split_units(int64_t phases, int64_t positions, int64_t rows,
                                        int64_t blocks, int64_t resident) {
  constexpr int64_t kMinLength = 32, kMaxLength = 256, kMaxWaves = 4;
  const int64_t most = std::max<int64_t>(1, phases * positions / (rows * kMinLength));
  // Long filters have few rows: with more than one unit each they are slower (H100).
  const int64_t least = std::clamp<int64_t>(
      std::min(ceil_div(phases * positions, rows * kMaxLength), kMaxWaves * resident / blocks), 1,
      most);
  const int64_t splits = choose_splits(blocks, resident, least, most);
  const int64_t each = ceil_div(phases * positions, splits * rows * kMaxLength);  // of a thread
  const int64_t parts = std::max<int64_t>(1, splits * rows * each / phases);
  const int64_t even = ceil_div(positions, parts * kGroup) * kGroup;
  const int64_t length = std::clamp(even, kMinLength, kMaxLength);
  const int64_t per_phase = ceil_div(positions, length), count = phases * per_phase;
  const int64_t per_split = ceil_div(ceil_div(count, splits), rows) * rows;
  if (count >= int64_t{1} << 29 || ceil_div(count, per_split) > kMaxGridY) {
    return std::nullopt;
  }
  return Units{static_cast<int>(count), static_cast<int>(per_split), static_cast<int>(per_phase),
               static_cast<int>(length)};
}

// Tiles of adjacent positions along T, the rows of a channel one after the other. Stores are
// aligned, so that the first tile of a row may begin before `first`.
struct Tiles {
  int first, per_row, count, per_split, splits;
  FastDivide by_row;

  __device__ int image_of(int tile) const { return by_row(tile); }
};

// A block of a kernel whose grid has one dimension: adjacent blocks are adjacent splits of a
// channel, so that rows are read as a whole.
struct TileBlock {
  const int channel, split, first, last;  // tiles first … last - 1 of the channel

  __device__ explicit TileBlock(const Tiles& tiles)
      : channel(blockIdx.x / static_cast<unsigned>(tiles.splits)),
        split(blockIdx.x - channel * tiles.splits),
        first(split * tiles.per_split),
        last(min(tiles.count, first + tiles.per_split)) {}
};

// Divide the rows of a channel into tiles, and these into splits of at most `most` tiles per
// thread. `aligned`: rows begin at tiles. `blocks`, `threads`: of a split; `resident`: of blocks at
// once.
inline Tiles split_tiles(int64_t images, int64_t first, int64_t positions, int64_t length,
                         bool aligned, int64_t blocks, int64_t threads, int64_t resident,
                         int64_t most = int64_t{1} << 29) {
  constexpr int64_t kMinTiles = 2;  // per thread
  const int64_t per_row = ceil_div(positions + (aligned ? 0 : length - 1), length);
  const int64_t count = images * per_row, least = ceil_div(count, threads * most);
  const int64_t splits =
      choose_splits(blocks, resident, least, std::max(least, ceil_div(count, threads * kMinTiles)));
  const int64_t per_split = ceil_div(count, splits);
  return {static_cast<int>(first),
          static_cast<int>(per_row),
          static_cast<int>(count),
          static_cast<int>(per_split),
          static_cast<int>(ceil_div(count, per_split)),
          FastDivide(per_row)};
}

}  // namespace ops::depthwise_conv1d
