// Stages of nchw_fma and nchw_mma. What a block works on, whole feature maps (one channel of one
// image each) or a band of rows of one, is one contiguous span of memory: bulk copies of 16 bytes
// move it, whatever the width, while other stages are computed.
#pragma once

#include <optional>

#include "core/cuda/tma_ring.cuh"
#include "depthwise_conv2d/cuda/tap_maps.cuh"

namespace ops::cuda {

struct NchwParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // image coordinate of the first output's first input
  int across, down;      // tiles of a map's outputs, or of a band's
  int shifts;            // columns by which rows of tiles may differ: see FmaPosition
  int bands;             // of a map; more than 1 only where group is 1
  int group;             // maps at a time
  int channels;
  int maps;
  int in_bytes, out_bytes;  // of shared memory for a span, each with a guard behind it

  __device__ bool has_in_row(int row) const {
    return static_cast<unsigned>(row) < static_cast<unsigned>(in_h);
  }
  // The channel that a count over the maps of several images stands for.
  __device__ int wrap(int channel) const {
    while (channel >= channels) {
      channel -= channels;
    }
    return channel;
  }
};

constexpr int kNchwThreads = 256;  // at most
constexpr int kGuard = 128;        // bytes that windows at an edge reach over a span,
constexpr int kMaxPadding = 8;     // where there is no more padding than this

// The maps, and rows of them, that a block works on next.
struct StageRange {
  int map, maps;
  int out_row, out_rows;
  int in_row, in_rows;

  template <typename Axis, int kRows>
  __device__ static StageRange at(const NchwParams& params, int map, int maps, int band) {
    StageRange range{map, maps, 0, params.out_h, 0, params.in_h};
    if (params.bands > 1) {
      const int rows = params.down * kRows;
      range.out_row = band * rows;
      range.out_rows = min(rows, params.out_h - range.out_row);
      const int first = params.start_h + Axis::step(range.out_row);
      range.in_row = min(max(first, 0), params.in_h);
      range.in_rows = max(0, min(first + Axis::inputs(rows), params.in_h) - range.in_row);
    }
    return range;
  }
};

// Goes from one range of a block to its next, without a division.
template <typename Axis, int kRows>
class StageIterator {
 public:
  __device__ explicit StageIterator(const NchwParams& params)
      : params_(params),
        stride_(gridDim.x / params.bands * params.group),
        band_stride_(gridDim.x % params.bands),
        channel_stride_(stride_ % params.channels),
        map_(blockIdx.x / params.bands * params.group),
        band_(blockIdx.x % params.bands),
        channel_(map_ % params.channels) {}

  __device__ bool any() const { return map_ < params_.maps; }
  __device__ StageRange range() const {
    return StageRange::at<Axis, kRows>(params_, map_, min(params_.group, params_.maps - map_),
                                       band_);
  }
  // The channel of the range's p-th map.
  __device__ int channel(int p) const { return params_.wrap(channel_ + p); }

  __device__ void advance() {
    map_ += stride_, channel_ += channel_stride_, band_ += band_stride_;
    if (band_ >= params_.bands) {
      band_ -= params_.bands, map_ += params_.group, channel_ += params_.group;
    }
    channel_ = params_.wrap(channel_);
  }

 private:
  const NchwParams& params_;
  int stride_, band_stride_, channel_stride_;
  int map_, band_, channel_;
};

// The maps of a tensor.
template <typename T>
class FeatureMaps {
 public:
  __device__ FeatureMaps(T* data, int count, int h, int w)
      : data_(data),
        count_(count),
        size_(h * w),
        w_(w),
        skew_(reinterpret_cast<uintptr_t>(data) % kGranule / sizeof(T)) {}

  __device__ T* row(int map, int row) const {
    return data_ + static_cast<int64_t>(map) * size_ + row * w_;
  }
  // Of a span that begins there.
  __device__ int skew(int map, int row) const {
    return (skew_ + static_cast<unsigned>(map) * size_ + row * w_) % Span<T>::kLanes;
  }
  __device__ int elements(int maps, int rows) const { return maps * rows * w_; }
  // Rows of neighbouring maps.
  __device__ Span<T> span(int map, int maps, int first_row, int rows) const {
    return {row(map, first_row), elements(maps, rows), row(count_, 0)};
  }

 private:
  T* data_;
  int count_, size_, w_;
  unsigned skew_;
};

// Shared memory of both kernels: the ring's, zeros for rows outside the image (and the guard before
// the first buffer), then the buffers.
template <int kBuffers, typename T>
struct StageMemory {
  static constexpr int kZeros = RingBuffer<kBuffers>::kBytes / sizeof(T);  // offset in elements
  static constexpr int kFirst = kZeros + kGuard / sizeof(T);
  static constexpr size_t kBytes = kFirst * sizeof(T);

  static __device__ T* clear(unsigned char* memory) {
    T* shared = reinterpret_cast<T*>(memory);
    for (int i = kZeros + threadIdx.x; i < kFirst; i += blockDim.x) {
      shared[i] = T(0);
    }
    return shared;
  }
};

constexpr int kSumLanes = 8;

// put(i, total) for each of `count` sums: the sum over kSumLanes lanes of part(i, lane), added
// by all threads of a block.
template <typename Put, typename F>
__device__ void add_lanes(int count, const Put& put, const F& part) {
  const int lane = threadIdx.x % kSumLanes;
#pragma unroll 4
  for (int first = 0; first < count; first += blockDim.x / kSumLanes) {
    const int i = first + threadIdx.x / kSumLanes;
    float total = i < count ? part(i, lane) : 0.0f;
#pragma unroll
    for (int lanes = kSumLanes / 2; lanes > 0; lanes /= 2) {
      total += __shfl_down_sync(~0u, total, lanes, kSumLanes);
    }
    if (lane == 0 && i < count) {
      put(i, total);
    }
  }
}

constexpr int kStages = 3;  // two on their way in, one at work or on its way out

struct NchwPlan {
  NchwParams params;
  int threads;
  int resident_blocks;  // blocks that run together
  int ranges;           // of all maps
  size_t shared;

  // At most that many blocks; preferably so many that each meets the same channels again.
  int blocks() const {
    const int period = params.channels / params.group * params.bands;
    const bool periodic = params.channels % params.group == 0 && period <= resident_blocks;
    return std::min(ranges, periodic ? resident_blocks / period * period : resident_blocks);
  }
};

// How to cut maps into ranges for tiles of a Shape: kRows × kCols outputs of each of kMaps
// maps take kThreads threads, of which blocks have up to kThreadsPerBlock (or kNchwThreads, where
// a row of tiles takes more) and a multiprocessor has registers for kThreadsPerSm. As much is
// done `repeats` times. A buffer holds a range of inputs and of outputs in one place, or, where
// `apart`, side by side. Nothing where a row of tiles is too long for a block, or the padding too
// wide.
template <typename Axis, typename Shape>
std::optional<NchwPlan> plan_nchw(int64_t maps, int64_t channels, int64_t in_h, int64_t in_w,
                                  int64_t out_h, int64_t out_w, int64_t padding_h,
                                  int64_t padding_w, int64_t repeats, int64_t element_size,
                                  bool apart, size_t fixed_bytes) {
  if (padding_w > kMaxPadding) {
    return std::nullopt;
  }
  const Device device;
  int across = ceil_div(out_w, Shape::kCols);
  const int down = ceil_div(out_h, Shape::kRows);
  // Tiles below each other are so many bytes apart that in a warp several meet in a bank, unless
  // rows of tiles begin at different columns: with a tile more in each, if blocks have room.
  const bool meet = Axis::step(Shape::kRows) * in_w * element_size % kGranule == 0;
  constexpr int kEnough = 3;  // columns
  const auto maps_of_block = [&](int tiles) {
    return Shape::kThreadsPerBlock / (tiles * Shape::kThreads * down);
  };
  if (meet && across * Shape::kCols - out_w < kEnough && maps_of_block(across) > 0 &&
      maps_of_block(across + 1) == maps_of_block(across)) {
    ++across;
  }
  const int row_threads = across * Shape::kThreads;
  const int most_threads =
      row_threads <= Shape::kThreadsPerBlock ? Shape::kThreadsPerBlock : kNchwThreads;
  std::optional<NchwPlan> best;
  double least = 0;
  // Whole maps, then fewer of them, then bands.
  int group =
      std::min<int64_t>(std::max(1, most_threads / (row_threads * down)) * Shape::kMaps, maps);
  for (int bands = 1, last = 0; bands <= down && row_threads <= most_threads;) {
    NchwPlan plan{};
    NchwParams& params = plan.params;
    params.in_h = in_h, params.in_w = in_w, params.out_h = out_h, params.out_w = out_w;
    params.start_h = Axis::start(padding_h), params.start_w = Axis::start(padding_w);
    params.channels = channels, params.maps = maps;
    params.across = across;
    params.shifts = meet ? across * Shape::kCols - out_w : 0;
    params.down = ceil_div(down, bands);
    params.bands = ceil_div(down, params.down);
    params.group = group;
    const int64_t in_rows = params.bands == 1
                                ? in_h
                                : std::min<int64_t>(in_h, Axis::inputs(params.down * Shape::kRows));
    const int64_t out_rows = std::min<int64_t>(out_h, params.down * Shape::kRows);
    const auto bytes = [&](int64_t elements) {
      return ceil_div(elements * element_size, kGranule) * kGranule + kGranule + kGuard;
    };
    const size_t in_bytes = bytes(group * in_rows * in_w);
    const size_t out_bytes = bytes(group * out_rows * out_w);
    plan.threads = round_up(ceil_div(group, Shape::kMaps) * row_threads * params.down, 32);
    plan.shared = fixed_bytes + (apart ? kPrefetchDistance * (in_bytes + out_bytes)
                                       : kStages * std::max(in_bytes, out_bytes));
    if (params.down != last && plan.threads <= most_threads && plan.shared <= device.block_shared) {
      params.in_bytes = in_bytes, params.out_bytes = out_bytes;
      const int on_one =
          std::min<int>(Shape::kThreadsPerSm / plan.threads, device.shared / (plan.shared + 1024));
      plan.resident_blocks = on_one * device.multiprocessors;
      plan.ranges = ceil_div(maps, group) * params.bands;
      // Rounds, each as long as what a multiprocessor does in it, and latencies.
      const int64_t blocks = plan.ranges * repeats;
      const int64_t together = std::min<int64_t>(on_one, ceil_div(blocks, device.multiprocessors));
      constexpr int kLatency = 128;  // also of the kernel that adds up sums where they are in parts
      const double round = together * plan.threads * (params.bands > 1 ? 1.2 : 1.0) + kLatency;
      const double cost = ceil_div(blocks, plan.resident_blocks) * round +
                          (apart && repeats * params.bands > 1 ? kLatency : 0);
      if (!best || cost < least) {
        best = plan, least = cost;
      }
    }
    if (group > 1) {
      group /= 2;
    } else {
      last = params.down;
      bands *= 2;
    }
  }
  return best;
}

}  // namespace ops::cuda
