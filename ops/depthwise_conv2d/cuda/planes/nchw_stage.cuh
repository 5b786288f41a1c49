// Stages of nchw_fma and nchw_mma, and the plan that cuts a tensor into them. A stage is a group of
// whole feature maps (one channel of one image each), or a band of rows of one map. Either is one
// contiguous span of memory, copied in bulk while other stages are computed.
#pragma once

#include <optional>

#include "core/choose.h"
#include "core/cuda/tma_ring.cuh"
#include "depthwise_conv2d/cuda/taps.cuh"

namespace ops::cuda {

struct NchwParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // input coordinates of the first output's window
  int tiles_w, tiles_h;  // tiles of the outputs of a map or band
  int spare_cols;        // columns covered by tiles_w tiles beyond out_w: see FmaPosition
  int bands;             // per map; > 1 only if group is 1
  int group;             // maps per stage
  int channels;
  int maps;
  int in_bytes, out_bytes;  // shared memory of a span and the guard behind it

  __device__ bool has_in_row(int row) const { return is_inside(row, in_h); }
  __device__ int wrap_channel(int channel) const {
    while (channel >= channels) {
      channel -= channels;
    }
    return channel;
  }
};

constexpr int kNchwThreads = 256;  // maximum per block
constexpr int kMaxPadding = 8;
constexpr int kGuardBytes = 128;  // around spans: edge windows read beyond, up to kMaxPadding

// Maps and rows of a stage.
struct Stage {
  int map, maps;
  int out_row, out_rows;
  int in_row, in_rows;

  template <typename Axis, int kRows>
  __device__ static Stage at(const NchwParams& params, int map, int maps, int band) {
    Stage stage{map, maps, 0, params.out_h, 0, params.in_h};
    if (params.bands > 1) {
      const int rows = params.tiles_h * kRows;
      stage.out_row = band * rows;
      stage.out_rows = min(rows, params.out_h - stage.out_row);
      const int first = params.start_h + Axis::step(stage.out_row);
      stage.in_row = min(max(first, 0), params.in_h);
      stage.in_rows = max(0, min(first + Axis::inputs(rows), params.in_h) - stage.in_row);
    }
    return stage;
  }
};

// Iterator over the stages of a block (grid-stride, without divisions).
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

  __device__ bool valid() const { return map_ < params_.maps; }
  __device__ Stage stage() const {
    return Stage::at<Axis, kRows>(params_, map_, min(params_.group, params_.maps - map_), band_);
  }
  // Return the channel of the stage's p-th map.
  __device__ int channel(int p) const { return params_.wrap_channel(channel_ + p); }

  __device__ void advance() {
    map_ += stride_, channel_ += channel_stride_, band_ += band_stride_;
    if (band_ >= params_.bands) {
      band_ -= params_.bands, map_ += params_.group, channel_ += params_.group;
    }
    channel_ = params_.wrap_channel(channel_);
  }

 private:
  const NchwParams& params_;
  int stride_, band_stride_, channel_stride_;
  int map_, band_, channel_;
};

// Addresses of the feature maps of an NCHW tensor.
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
  // Return Span::skew of a span that begins at this row, without 64-bit arithmetic.
  __device__ int skew(int map, int row) const {
    return (skew_ + static_cast<unsigned>(map) * size_ + row * w_) % Span<T>::kLanes;
  }
  __device__ int elements(int maps, int rows) const { return maps * rows * w_; }
  // Return the span of `rows` rows of one map, or of all rows of adjacent maps.
  __device__ Span<T> span(int map, int maps, int first_row, int rows) const {
    return {row(map, first_row), elements(maps, rows), row(count_, 0)};
  }

 private:
  T* data_;
  int count_, size_, w_;
  unsigned skew_;
};

// Layout of shared memory: barriers of the ring; zeros, read for rows outside the image (and the
// guard before the first buffer); buffers.
template <int kBuffers, typename T>
struct StageLayout {
  static constexpr int kZeros = RingBuffer<kBuffers>::kBytes / sizeof(T);  // offset in elements
  static constexpr int kFirst = kZeros + kGuardBytes / sizeof(T);
  static constexpr size_t kBytes = kFirst * sizeof(T);

  static __device__ T* clear(unsigned char* memory) {
    T* shared = reinterpret_cast<T*>(memory);
    for (int i = kZeros + threadIdx.x; i < kFirst; i += blockDim.x) {
      shared[i] = T(0);
    }
    return shared;
  }
};

constexpr int kReduceLanes = 8;

// Reduce `count` sums: call put(i, Σ part(i, lane) over kReduceLanes lanes). A warp-shuffle
// reduction by all threads of the block.
template <typename Put, typename F>
__device__ void reduce_lanes(int count, const Put& put, const F& part) {
  const int lane = threadIdx.x % kReduceLanes;
#pragma unroll 4
  for (int first = 0; first < count; first += blockDim.x / kReduceLanes) {
    const int i = first + threadIdx.x / kReduceLanes;
    float total = i < count ? part(i, lane) : 0.0f;
#pragma unroll
    for (int lanes = kReduceLanes / 2; lanes > 0; lanes /= 2) {
      total += __shfl_down_sync(~0u, total, lanes, kReduceLanes);
    }
    if (lane == 0 && i < count) {
      put(i, total);
    }
  }
}

constexpr int kStages = 3;  // ring buffer: two loads in flight, one stage computed or stored

struct NchwPlan {
  NchwParams params;
  int threads;
  int resident_blocks;  // blocks that fit on the device at once
  int stages;           // stages of all maps
  size_t shared;

  // Return the grid size. Preferably a multiple of the channels' period: each block then keeps its
  // channels, and reloads no filter.
  int blocks() const {
    const int period = params.channels / params.group * params.bands;
    const bool periodic = params.channels % params.group == 0 && period <= resident_blocks;
    return std::min(stages, periodic ? resident_blocks / period * period : resident_blocks);
  }
};

// Choose the stages with the least estimated cost. Shape: kThreads threads compute a tile of
// kRows × kCols outputs of each of kMaps maps; kThreadsPerBlock is the preferred and kNchwThreads
// the maximum block size; registers allow kThreadsPerSm threads. `repeats`: images for which a
// stage is computed (weight gradient: all, else 1). `separate`: inputs and outputs have separate
// buffers, else outputs overwrite inputs. nullopt: a row of tiles exceeds a block, or padding_w
// exceeds kMaxPadding.
template <typename Axis, typename Shape>
std::optional<NchwPlan> plan_nchw(int64_t maps, int64_t channels, int64_t in_h, int64_t in_w,
                                  int64_t out_h, int64_t out_w, int64_t padding_h,
                                  int64_t padding_w, int64_t repeats, int64_t element_size,
                                  bool separate, size_t fixed_bytes) {
  if (padding_w > kMaxPadding) {
    return std::nullopt;
  }
  const Device device;
  int tiles_w = ceil_div(out_w, Shape::kCols);
  const int tiles_h = ceil_div(out_h, Shape::kRows);
  // If tiles below each other are a multiple of 16 bytes apart, threads of a warp conflict in
  // banks. FmaPosition then shifts rows of tiles against each other, for which a row may need one
  // more tile.
  const bool bank_conflicts = Axis::step(Shape::kRows) * in_w * element_size % kGranule == 0;
  constexpr int kMinSpareCols = 3;
  const auto tiles_per_block = [&](int tiles) {
    return Shape::kThreadsPerBlock / (tiles * Shape::kThreads * tiles_h);
  };
  if (bank_conflicts && tiles_w * Shape::kCols - out_w < kMinSpareCols &&
      tiles_per_block(tiles_w) > 0 && tiles_per_block(tiles_w + 1) == tiles_per_block(tiles_w)) {
    ++tiles_w;
  }
  const int row_threads = tiles_w * Shape::kThreads;
  const int max_threads =
      row_threads <= Shape::kThreadsPerBlock ? Shape::kThreadsPerBlock : kNchwThreads;
  Cheapest<NchwPlan> cheapest;
  // Try groups of whole maps of decreasing size, then bands.
  int group =
      std::min<int64_t>(std::max(1, max_threads / (row_threads * tiles_h)) * Shape::kMaps, maps);
  for (int bands = 1, last = 0; bands <= tiles_h && row_threads <= max_threads;) {
    NchwPlan plan{};
    NchwParams& params = plan.params;
    params.in_h = in_h, params.in_w = in_w, params.out_h = out_h, params.out_w = out_w;
    params.start_h = Axis::start(padding_h), params.start_w = Axis::start(padding_w);
    params.channels = channels, params.maps = maps;
    params.tiles_w = tiles_w;
    params.spare_cols = bank_conflicts ? tiles_w * Shape::kCols - out_w : 0;
    params.tiles_h = ceil_div(tiles_h, bands);
    params.bands = ceil_div(tiles_h, params.tiles_h);
    params.group = group;
    const int64_t in_rows =
        params.bands == 1 ? in_h
                          : std::min<int64_t>(in_h, Axis::inputs(params.tiles_h * Shape::kRows));
    const int64_t out_rows = std::min<int64_t>(out_h, params.tiles_h * Shape::kRows);
    const auto bytes = [&](int64_t elements) {
      return ceil_div(elements * element_size, kGranule) * kGranule + kGranule + kGuardBytes;
    };
    const size_t in_bytes = bytes(group * in_rows * in_w);
    const size_t out_bytes = bytes(group * out_rows * out_w);
    plan.threads = round_up(ceil_div(group, Shape::kMaps) * row_threads * params.tiles_h, 32);
    plan.shared = fixed_bytes + (separate ? kPrefetchDistance * (in_bytes + out_bytes)
                                          : kStages * std::max(in_bytes, out_bytes));
    if (params.tiles_h != last && plan.threads <= max_threads &&
        plan.shared <= device.block_shared) {
      params.in_bytes = in_bytes, params.out_bytes = out_bytes;
      const int blocks_per_sm =
          std::min<int>(Shape::kThreadsPerSm / plan.threads, device.shared / (plan.shared + 1024));
      plan.resident_blocks = blocks_per_sm * device.multiprocessors;
      plan.stages = ceil_div(maps, group) * params.bands;
      // Cost: waves × (threads per SM, 20 % more for the halo of bands, + latency).
      const int64_t blocks = plan.stages * repeats;
      const int64_t active_blocks =
          std::min<int64_t>(blocks_per_sm, ceil_div(blocks, device.multiprocessors));
      constexpr int kLatency = 128;  // of a wave; also of the second stage of a weight gradient
      const double round_cost =
          active_blocks * plan.threads * (params.bands > 1 ? 1.2 : 1.0) + kLatency;
      const double cost = ceil_div(blocks, plan.resident_blocks) * round_cost +
                          (separate && repeats * params.bands > 1 ? kLatency : 0);
      cheapest.offer(plan, cost);
    }
    if (group > 1) {
      group /= 2;
    } else {
      last = params.tiles_h;
      // The last plan has one row of tiles per band: wide images fit no other.
      bands = bands < tiles_h ? std::min(bands * 2, tiles_h) : bands * 2;
    }
  }
  return cheapest.best();
}

}  // namespace ops::cuda
