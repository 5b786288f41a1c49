// Shared by nchw_fma and nchw_mma: stages, the plan that cuts a tensor into them, the kernels,
// templated on the tile that computes a stage, and their launches. A stage is a group of whole
// feature maps (one channel of one image each), or a band of rows of one map. Either is one
// contiguous span of memory, copied in bulk while other stages are computed.
#pragma once

#include <optional>

#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/planes/tma_ring.cuh"

namespace ops::depthwise_conv2d {

constexpr int kNchwThreads = 256;  // maximum per block
constexpr int kStages = 3;         // ring buffer: two loads in flight, one stage computed or stored

// Shared memory: barriers of the ring; zeros, read for rows outside the image; buffers. The zeros
// and a guard behind each span are as large as edge windows read beyond a span.
constexpr int kMaxPadding = 8;
constexpr int kGuardBytes = 128;
constexpr int kZerosOffset = RingBuffer<kStages>::kBytes;  // in bytes
constexpr int kBuffersOffset = kZerosOffset + kGuardBytes;

struct NchwParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // input coordinates of the first output's window
  int tiles_w, tiles_h;  // tiles of the outputs of a map or band
  int spare_cols;        // columns covered by tiles_w tiles beyond out_w: see TilePosition
  int bands;             // per map; > 1 only if group is 1
  int group;             // maps per stage
  int stages;            // of all images; weight gradient: of one image
  int images, channels;
  bool flip;                // the filters
  int in_bytes, out_bytes;  // shared memory of a span and the guard behind it
  FastDivide by_bands{1}, by_channels{1};

  __device__ bool has_in_row(int row) const { return is_inside(row, in_h); }
};

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

// Feature maps of an NCHW tensor.
template <typename T>
struct FeatureMaps {
  T* data;
  int count, h, w;

  // Return the span of `rows` rows of one map, or of all rows of adjacent maps.
  __device__ Span<T> span(int map, int maps, int first_row, int rows) const {
    const int64_t size = h * w;
    return {data + map * size + first_row * w, maps * rows * w, data + count * size};
  }
  // Return Span::skew of a span that begins at this row, without 64-bit arithmetic.
  __device__ int skew(int map, int row) const {
    const unsigned first = reinterpret_cast<uintptr_t>(data) / sizeof(T);
    return (first + static_cast<unsigned>(map) * h * w + row * w) % Span<T>::kLanes;
  }
};

// Hide the origin of x: what depends on it is computed anew instead of kept in registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A tile's first map and output within every stage.
template <typename Tile>
struct TilePosition {
  int map, row, col;

  __device__ explicit TilePosition(const NchwParams& params) {
    const int tile = threadIdx.x / Tile::kThreads, line = tile / params.tiles_w;
    map = line / params.tiles_h * Tile::kMaps;
    row = line % params.tiles_h * Tile::kRows;
    col = tile % params.tiles_w * Tile::kCols;
    // Shift successive rows of tiles to the left by up to spare_cols, against bank conflicts
    // between threads with tiles below each other.
    if constexpr (Tile::kShift > 0) {
      col -= line % (params.spare_cols / Tile::kShift + 1) * Tile::kShift;
    }
  }
};

struct NchwPlan {
  NchwParams params;
  int threads;
  int resident_blocks;  // blocks that fit on the device at once
  size_t shared;
};

// Choose the stages with the least estimated cost. Tile: kThreads threads compute a tile of
// kRows × kCols outputs of each of kMaps maps; kThreadsPerBlock is the preferred and kNchwThreads
// the maximum block size; registers allow kThreadsPerSm threads; kShift > 0: unit of TilePosition's
// shifts. `gradient`: inputs and outputs have separate buffers, and all images the same stages,
// else outputs overwrite inputs. Return nullopt if a row of tiles exceeds a block or padding_w
// exceeds kMaxPadding.
template <typename Tile, typename In, typename Out>
std::optional<NchwPlan> plan_nchw(const Geometry& g, bool gradient, const Image<In>& in,
                                  const Image<Out>& out, int64_t padding_h, int64_t padding_w) {
  using Axis = typename Tile::Axis;
  if (padding_w > kMaxPadding) {
    return std::nullopt;
  }
  const Device device;
  const int64_t maps = gradient ? g.c : g.n * g.c, repeats = gradient ? g.n : 1;
  const int tiles_h = ceil_div(out.h, Tile::kRows);
  const int tiles_w = ceil_div(out.w, Tile::kCols);
  // If tiles below each other are a multiple of 16 bytes apart, threads of a warp conflict in
  // banks; spare columns allow to shift rows of tiles against each other. Fewer do not help (H100).
  constexpr int kMinSpareCols = Axis::kStride == 2 && !Axis::kTransposed ? 3 : 2;
  const int spare_cols = tiles_w * Tile::kCols - out.w;
  const bool shifts = Tile::kShift > 0 && spare_cols >= kMinSpareCols &&
                      Axis::step(Tile::kRows) * in.w * sizeof(In) % kGranule == 0;
  const int row_threads = tiles_w * Tile::kThreads;
  const int max_threads =
      row_threads <= Tile::kThreadsPerBlock ? Tile::kThreadsPerBlock : kNchwThreads;
  Cheapest<NchwPlan> cheapest;
  const auto offer = [&](int group, int band_tiles) {
    NchwPlan plan{};
    NchwParams& params = plan.params;
    params.in_h = in.h, params.in_w = in.w, params.out_h = out.h, params.out_w = out.w;
    params.start_h = Axis::start(padding_h), params.start_w = Axis::start(padding_w);
    params.tiles_w = tiles_w, params.tiles_h = band_tiles;
    params.spare_cols = shifts ? spare_cols : 0;
    params.bands = ceil_div(tiles_h, band_tiles), params.group = group;
    params.stages = ceil_div(maps, group) * params.bands;
    params.images = g.n, params.channels = g.c;
    params.by_bands = FastDivide(params.bands), params.by_channels = FastDivide(g.c);
    const int64_t out_rows = std::min<int64_t>(out.h, band_tiles * Tile::kRows);
    const int64_t in_rows =
        params.bands == 1 ? in.h : std::min<int64_t>(in.h, Axis::inputs(band_tiles * Tile::kRows));
    const auto bytes = [&](int64_t elements) {
      return ceil_div(elements * sizeof(In), kGranule) * kGranule + kGranule + kGuardBytes;
    };
    const int64_t in_bytes = bytes(group * in_rows * in.w);
    const int64_t out_bytes = bytes(group * out_rows * out.w);
    params.in_bytes = in_bytes, params.out_bytes = out_bytes;
    plan.shared = kBuffersOffset + (gradient ? kPrefetchDistance * (in_bytes + out_bytes)
                                             : kStages * std::max(in_bytes, out_bytes));
    plan.threads = round_up(ceil_div(group, Tile::kMaps) * row_threads * band_tiles, 32);
    if (plan.threads > max_threads || plan.shared > device.block_shared) {
      return;
    }
    const int blocks_per_sm =
        std::min<int>(Tile::kThreadsPerSm / plan.threads, device.blocks_per_sm(plan.shared));
    plan.resident_blocks = blocks_per_sm * device.multiprocessors;
    // Cost: waves × (threads per SM, 20 % more for the halo of bands, + latency).
    const int64_t blocks = params.stages * repeats;
    const int64_t active_blocks =
        std::min<int64_t>(blocks_per_sm, ceil_div(blocks, device.multiprocessors));
    constexpr int kLatency = 128;  // of a wave; also of the second stage of a weight gradient
    const double wave_cost =
        active_blocks * plan.threads * (params.bands > 1 ? 1.2 : 1.0) + kLatency;
    cheapest.offer(plan, ceil_div(blocks, plan.resident_blocks) * wave_cost +
                             (gradient && repeats * params.bands > 1 ? kLatency : 0));
  };
  // Try groups of whole maps of decreasing size, then bands, of at least one row of tiles.
  const int64_t most = std::max(1, max_threads / (row_threads * tiles_h)) * Tile::kMaps;
  for (int group = std::min(most, maps); group > 1; group /= 2) {
    offer(group, tiles_h);
  }
  for (int bands = 1; bands < 2 * tiles_h; bands *= 2) {
    offer(1, ceil_div(tiles_h, bands));
  }
  return cheapest.best();
}

// Compute stages first, first + stride … < end. load(i, buffer) starts to load stage i, or nothing
// if i ≥ end; compute(i, buffer) calls ring.wait() before it reads its buffer. Offsets of buffers
// are in elements. Return after the last use of shared memory.
template <typename T, int kBuffers, typename Load, typename Compute>
__device__ __forceinline__ void for_each_stage(RingBuffer<kBuffers>& ring, T* shared,
                                               int buffer_bytes, int first, int end, int stride,
                                               const Load& load, const Compute& compute) {
  const auto buffer = [&](int slot) {
    return static_cast<int>((kBuffersOffset + slot * buffer_bytes) / sizeof(T));
  };
  for (int i = threadIdx.x; i < kGuardBytes / sizeof(T); i += blockDim.x) {
    shared[kZerosOffset / sizeof(T) + i] = T(0);
  }
  if (ring.issues_loads()) {
    for (int i = 0; i < kPrefetchDistance; ++i) {
      load(first + i * stride, buffer(i));
    }
  }
  __syncthreads();
  int slot = 0;
  for (int i = first; i < end; i += stride) {
    compute(i, buffer(slot));
    if (ring.issues_loads()) {
      load(i + kPrefetchDistance * stride, buffer((slot + kPrefetchDistance) % kBuffers));
    }
    slot = (slot + 1) % kBuffers;
  }
}

template <typename Tile, typename T>
__global__ void __launch_bounds__(kNchwThreads, Tile::kThreadsPerSm / kNchwThreads)
    nchw_kernel(NchwParams params, const T* __restrict__ in, const T* __restrict__ weight,
                const T* __restrict__ bias, T* __restrict__ out) {
  extern __shared__ __align__(kGuardBytes) unsigned char memory[];
  RingBuffer<kStages> ring(memory);
  T* shared = reinterpret_cast<T*>(memory);
  Tile tile(params);
  const int maps = params.images * params.channels;
  const FeatureMaps<const T> inputs{in, maps, params.in_h, params.in_w};
  const FeatureMaps<T> outputs{out, maps, params.out_h, params.out_w};
  const auto stage_at = [&](int i) {
    const int group = params.by_bands(i), map = group * params.group;
    return Stage::at<typename Tile::Axis, Tile::kRows>(params, map, min(params.group, maps - map),
                                                       i - group * params.bands);
  };
  int loaded = -1;
  for_each_stage(
      ring, shared, max(params.in_bytes, params.out_bytes), blockIdx.x, params.stages, gridDim.x,
      [&](int i, int buffer) {
        const Stage stage = stage_at(i);
        ring.load(i < params.stages, shared + buffer,
                  inputs.span(stage.map, stage.maps, stage.in_row, stage.in_rows));
      },
      [&](int i, int buffer) {
        const Stage stage = stage_at(i);
        const bool active = tile.map() < stage.maps;
        const int map = stage.map + (active ? tile.map() : 0);
        const int channel = map - params.by_channels(map) * params.channels;
        if (channel != loaded) {  // rare: see launch_nchw
          tile.load_filter(weight, bias, channel);
          loaded = channel;
        }
        ring.wait();
        if (active) {
          tile.convolve(shared, buffer + inputs.skew(stage.map, stage.in_row), stage);
        }
        __syncthreads();  // outputs overwrite the inputs
        const int skew = outputs.skew(stage.map, stage.out_row);
        if (active) {
          tile.store(shared + buffer + skew, stage, in);
        }
        ring.store(shared + buffer, skew, stage.maps * stage.out_rows * params.out_w, [&] {
          return outputs.span(stage.map, stage.maps, stage.out_row, stage.out_rows).first;
        });
      });
  ring.drain();
}

// Grid (range of channels or band, split of the images). Each tile accumulates over its images.
template <typename Tile, typename T>
__global__ void __launch_bounds__(kNchwThreads, Tile::kThreadsPerSm / kNchwThreads)
    nchw_weight_gradient_kernel(NchwParams params, const T* __restrict__ x,
                                const T* __restrict__ grad, WeightReduction<T> reduction) {
  extern __shared__ __align__(kGuardBytes) unsigned char memory[];
  RingBuffer<kPrefetchDistance> ring(memory);
  T* shared = reinterpret_cast<T*>(memory);
  Tile tile(params);
  const int band = blockIdx.x % params.bands;
  const int first_channel = blockIdx.x / params.bands * params.group;
  const int channels = min(params.group, params.channels - first_channel);
  const int maps = params.images * params.channels;
  const FeatureMaps<const T> inputs{x, maps, params.in_h, params.in_w};
  const FeatureMaps<const T> grads{grad, maps, params.out_h, params.out_w};
  const int grad_offset = params.in_bytes / sizeof(T);
  const auto stage_at = [&](int n) {
    return Stage::at<typename Tile::Axis, Tile::kRows>(params, n * params.channels + first_channel,
                                                       channels, band);
  };
  for_each_stage(
      ring, shared, params.in_bytes + params.out_bytes, blockIdx.y, params.images, gridDim.y,
      [&](int n, int buffer) {
        const Stage stage = stage_at(n);
        ring.load(n < params.images, shared + buffer,
                  inputs.span(stage.map, stage.maps, stage.in_row, stage.in_rows),
                  shared + buffer + grad_offset,
                  grads.span(stage.map, stage.maps, stage.out_row, stage.out_rows));
      },
      [&](int n, int buffer) {
        ring.wait();
        if (tile.map() < channels) {
          const Stage stage = stage_at(n);
          tile.add(shared, buffer + inputs.skew(stage.map, stage.in_row),
                   buffer + grad_offset + grads.skew(stage.map, stage.out_row), stage);
        }
        __syncthreads();
      });
  trigger_dependent_launch();
  float* sums = reinterpret_cast<float*>(memory + kBuffersOffset);
  tile.store_sums(sums);
  __syncthreads();
  // A warp-shuffle reduction of each sum over kReduceLanes lanes.
  constexpr int kReduceLanes = Tile::kReduceLanes;
  const int count = channels * (Tile::kTaps + 1), lane = threadIdx.x % kReduceLanes;
#pragma unroll 4
  for (int first = 0; first < count; first += blockDim.x / kReduceLanes) {
    const int i = first + threadIdx.x / kReduceLanes;
    float total = i < count ? tile.partial_sum(sums, i, lane) : 0.0f;
#pragma unroll
    for (int lanes = kReduceLanes / 2; lanes > 0; lanes /= 2) {
      total += __shfl_down_sync(~0u, total, lanes, kReduceLanes);
    }
    if (lane == 0 && i < count) {
      reduction.put(blockIdx.y * params.bands + band, first_channel, i, total);
    }
  }
}

template <typename Tile, typename T>
bool launch_nchw(const Convolution<T>& c) {
  const auto plan = plan_nchw<Tile>(c.g, false, c.in, c.out, c.padding_h, c.padding_w);
  if (!plan) {
    return false;
  }
  // Preferably a multiple of the channels' period: each block then keeps its channels, and reloads
  // no filter.
  NchwParams params = plan->params;
  params.flip = c.flip;
  const int resident = plan->resident_blocks;
  const int period = params.channels / params.group * params.bands;
  const bool periodic = params.channels % params.group == 0 && period <= resident;
  const int blocks = std::min(params.stages, periodic ? resident / period * period : resident);
  c.launch(nchw_kernel<Tile, T>, blocks, plan->threads, plan->shared, params, c.in.data, c.weight,
           c.bias, c.out.data);
  return true;
}

template <typename Tile, typename T>
bool launch_nchw(const WeightGradient<T>& c) {
  const Geometry& g = c.g;
  const auto plan =
      plan_nchw<Tile>(g, true, Image<const T>{c.x, g.h, g.w},
                      Image<const T>{c.grad, g.out_h, g.out_w}, g.padding_h, g.padding_w);
  if (!plan) {
    return false;
  }
  const NchwParams& params = plan->params;
  const int64_t splits = choose_splits(g.n, params.stages, plan->resident_blocks, 2);
  const size_t reduction_bytes =
      kBuffersOffset + sizeof(float) * Tile::shared_floats(plan->threads);
  reduce_weights(c, splits * params.bands, [&](const WeightReduction<T>& reduction) {
    launch_kernel(nchw_weight_gradient_kernel<Tile, T>, dim3(params.stages, splits), plan->threads,
                  std::max(plan->shared, reduction_bytes), c.stream, params, c.x, c.grad,
                  reduction);
  });
  return true;
}

}  // namespace ops::depthwise_conv2d
