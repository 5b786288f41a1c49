// direct_l1: reads global memory through the L1 cache, without staging. For small problems and
// unaligned NHWC. Kernel, stride and dilation are compile-time constants; direct_l1_runtime.cu has
// the run-time version.
//
//      input window                     output
//      ┌───────────────┐               ┌───────────┐
//      │ x x x x x x x │  FMA, taps    │ register  │
//      │ x x x x x x x │ ────────────► │ tile      │
//      └───────────────┘ in registers  └───────────┘
//
//   block:   a range of register tiles of all images, of one channel (NCHW) or several (NHWC)
//   shared:  nothing; from 5×5 on the block's filters, on their way to registers
//   thread:  a register tile of 2 or 4 rows × 4 columns (small NCHW forward: 1 × 2); overlapping
//            windows hit the L1 cache
//
// Weight gradient
//   block:   the same, with tiles of 1 row × 4 or 8 columns
//   shared:  the sums of the threads, at the end
//   thread:  one sum per tap; stage 1 of a two-stage reduction
#include "core/cuda/divide.cuh"
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/taps.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {
namespace {

constexpr int kDirectThreads = 256;
constexpr int kMaxDirectLanes = 128;

// A block has (lanes, groups) threads: lanes for adjacent channels, groups for tiles.
struct DirectParams {
  int in_h, in_w, out_h, out_w;
  DirectStrides<> in, out;
  int start_h, start_w;  // input coordinates of the first output's window
  int channels;
  int tiles_h, tiles_w;  // per image
  FastDivide by_tiles_h, by_tiles_w;
  int tiles;  // of all images
  int tiles_per_block;
};

struct DirectPlan {
  DirectParams params;
  dim3 grid, block;
};

// Plan tiles of kRows × kCols outputs, V channels per thread, and at most about `blocks` blocks.
template <typename Axis, int kRows, int kCols, int V>
DirectPlan plan_direct(const DepthwiseGeometry& g, int64_t in_h, int64_t in_w, int64_t out_h,
                       int64_t out_w, int64_t padding_h, int64_t padding_w, int64_t blocks) {
  const int64_t vectors = ceil_div(g.c, V);
  const int64_t chunks = g.channels_last ? ceil_div(vectors, kMaxDirectLanes / V) : g.c;
  const int lanes = ceil_div(vectors, chunks);
  const int64_t tiles_h = ceil_div(out_h, kRows), tiles_w = ceil_div(out_w, kCols);
  const int64_t tiles = g.n * tiles_h * tiles_w;
  const int groups = std::min<int64_t>(kDirectThreads / lanes, tiles);
  const int64_t iterations =
      ceil_div(ceil_div(tiles, groups), std::max<int64_t>(1, blocks / chunks));
  const int tiles_per_block = groups * iterations;
  return {{static_cast<int>(in_h), static_cast<int>(in_w), static_cast<int>(out_h),
           static_cast<int>(out_w), DirectStrides<>(g, in_h, in_w),
           DirectStrides<>(g, out_h, out_w), Axis::start(padding_h), Axis::start(padding_w),
           static_cast<int>(g.c), static_cast<int>(tiles_h), static_cast<int>(tiles_w),
           FastDivide(tiles_h), FastDivide(tiles_w), static_cast<int>(tiles), tiles_per_block},
          dim3(ceil_div(tiles, tiles_per_block), chunks),
          dim3(lanes, groups)};
}

// A tile's image n, first output (row, col) and first input (y, x).
template <typename Axis, int kRows, int kCols>
struct DirectTile {
  int n, row, col, y, x;

  __device__ DirectTile(const DirectParams& params, int tile) {
    const int row_tile = params.by_tiles_w(tile);
    n = params.by_tiles_h(row_tile);
    row = (row_tile - n * params.tiles_h) * kRows;
    col = (tile - row_tile * params.tiles_w) * kCols;
    y = params.start_h + Axis::step(row);
    x = params.start_w + Axis::step(col);
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

// Threads read 3×3 filters from global memory (lower latency). Larger filters go through shared
// memory, which coalesces the reads.
template <typename Axis>
constexpr bool kFiltersFromGlobal = Axis::kTaps == 3;

template <typename Axis, int kRows, int kCols, int V, typename T>
__global__ void __launch_bounds__(kDirectThreads)
    direct_kernel(DirectParams params, bool flip, const T* __restrict__ in,
                  const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  constexpr int kInRows = Axis::inputs(kRows), kInCols = Axis::inputs(kCols);
  extern __shared__ float filters[];  // [channels of the block][kTaps]
  const int first = blockIdx.y * blockDim.x * V;
  if constexpr (!kFiltersFromGlobal<Axis>) {
    const int count = min(static_cast<int>(blockDim.x) * V, params.channels - first) * kTaps;
    for (int i = flat_thread(); i < count; i += blockDim.x * blockDim.y) {
      filters[i] = static_cast<float>(weight[first * kTaps + i]);
    }
    __syncthreads();
  }
  const int channel = first + threadIdx.x * V;
  if (channel >= params.channels) {
    return;
  }
  float filter[kTaps][V], initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias ? static_cast<float>(bias[channel + v]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const int tap = flip ? kTaps - 1 - i : i;
      if constexpr (kFiltersFromGlobal<Axis>) {
        filter[i][v] = static_cast<float>(weight[(channel + v) * kTaps + tap]);
      } else {
        filter[i][v] = filters[(threadIdx.x * V + v) * kTaps + tap];
      }
    }
  }
  in += channel * static_cast<int64_t>(params.in.c);
  out += channel * static_cast<int64_t>(params.out.c);
  const int begin = blockIdx.x * params.tiles_per_block;
  const int end = min(begin + params.tiles_per_block, params.tiles);
#pragma unroll 1
  for (int tile = begin + threadIdx.y; tile < end; tile += blockDim.y) {
    const DirectTile<Axis, kRows, kCols> at(params, tile);
    const T* from = in + params.in.offset(at.n, at.y, at.x);
    float sum[kRows][kCols][V];
#pragma unroll
    for (int i = 0; i < kRows * kCols * V; ++i) {
      sum[i / (kCols * V)][i / V % kCols][i % V] = initial[i % V];
    }
#pragma unroll
    for (int r = 0; r < kInRows; ++r, from += params.in.h) {
      const bool row_inside = is_inside(at.y + r, params.in_h);
      float x[kInCols][V];
      load_row(from, row_inside, at.x, params.in_w, params.in.w, x);
      for_each_tap<Axis, Axis, kRows, kCols, kInCols>(r, [&](int q, int j, int tap, int i) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum[q][j][v] += filter[tap][v] * x[i][v];
        }
      });
    }
    T* to = out + params.out.offset(at.n, at.row, at.col);
#pragma unroll
    for (int q = 0; q < kRows; ++q, to += params.out.h) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (at.row + q < params.out_h && at.col + j < params.out_w) {
          store_vector(to + j * params.out.w, sum[q][j]);
        }
      }
    }
  }
}

template <typename Axis, int kCols, typename T>
__global__ void __launch_bounds__(kDirectThreads)
    direct_weight_gradient_kernel(DirectParams params, const T* __restrict__ in,
                                  const T* __restrict__ grad, WeightReduction<T> reduction) {
  constexpr int kTaps = Axis::kTaps * Axis::kTaps, kSums = kTaps + 1;
  constexpr int kInRows = Axis::inputs(1), kInCols = Axis::inputs(kCols);
  extern __shared__ float sums[];
  const int channel = blockIdx.y * blockDim.x + threadIdx.x;
  const bool valid = channel < params.channels;
  in += channel * static_cast<int64_t>(params.in.c);
  grad += channel * static_cast<int64_t>(params.out.c);
  const int begin = blockIdx.x * params.tiles_per_block;
  const int end = min(begin + params.tiles_per_block, params.tiles);
  float sum[kSums][1] = {};
#pragma unroll 1
  for (int tile = begin + threadIdx.y; valid && tile < end; tile += blockDim.y) {
    const DirectTile<Axis, 1, kCols> at(params, tile);
    const T* from = in + params.in.offset(at.n, at.y, at.x);
    float g[kCols][1];
    load_row(grad + params.out.offset(at.n, at.row, at.col), true, at.col, params.out_w,
             params.out.w, g);
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      sum[kTaps][0] += g[j][0];
    }
#pragma unroll
    for (int r = 0; r < kInRows; ++r, from += params.in.h) {
      const bool row_inside = is_inside(at.y + r, params.in_h);
      float x[kInCols][1];
      load_row(from, row_inside, at.x, params.in_w, params.in.w, x);
      for_each_tap<Axis, Axis, 1, kCols, kInCols>(
          r, [&](int, int j, int tap, int i) { sum[tap][0] += g[j][0] * x[i][0]; });
    }
  }

  const int first = blockIdx.y * blockDim.x;
  const int channels = min(static_cast<int>(blockDim.x), params.channels - first);
  reduce_and_put(sum, sums, threadIdx.x, blockDim.x, threadIdx.y, blockDim.y, channels,
                 BlockSums<T>(reduction, blockIdx.x, first));
}

template <typename Axis, int kRows, int kCols, int V, typename T>
void launch_direct(const Convolution<T>& c) {
  constexpr int kBlocks = 32;  // per SM
  const auto plan =
      plan_direct<Axis, kRows, kCols, V>(c.g, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h,
                                         c.padding_w, int64_t{kBlocks} * Device().multiprocessors);
  const size_t filters =
      kFiltersFromGlobal<Axis> ? 0 : sizeof(float) * plan.block.x * V * Axis::kTaps * Axis::kTaps;
  c.launch(direct_kernel<Axis, kRows, kCols, V, T>, plan.grid, plan.block, filters, plan.params,
           c.flip, c.in.data, c.weight, c.bias, c.out.data);
}

// Launch with tiles of 1 × kCols outputs and kBlocks blocks per SM.
template <typename Axis, int kCols, int kBlocks, typename T>
void launch_direct_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  const auto plan =
      plan_direct<Axis, 1, kCols, 1>(g, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w,
                                     int64_t{kBlocks} * Device().multiprocessors);
  const size_t shared =
      sizeof(float) * reduction_elements(plan.block.x, plan.block.y, Axis::kTaps * Axis::kTaps + 1);
  reduce_weights(c, plan.grid.x, [&](const WeightReduction<T>& reduction) {
    launch_kernel(direct_weight_gradient_kernel<Axis, kCols, T>, plan.grid, plan.block, shared,
                  c.stream, plan.params, c.x, c.grad, reduction);
  });
}

}  // namespace

template <typename T>
bool direct_l1(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    constexpr int kWordChannels = 4 / sizeof(T);  // channels of a 32-bit word
    const bool vectorised = c.g.channels_last && c.g.c % kWordChannels == 0 &&
                            are_aligned({c.in.data, c.out.data}, kWordChannels * sizeof(T));
    // High tiles re-read fewer halo rows, but need enough threads to fill the device.
    constexpr int kLowRows = 2, kHighRows = 4, kCols = 4;
    const int64_t outputs = c.g.n * c.g.c * c.out.h * c.out.w;
    const int64_t threads = outputs / (kHighRows * kCols * (vectorised ? kWordChannels : 1));
    const bool high = threads >= int64_t{kDirectThreads} * Device().multiprocessors;
    if (vectorised && high) {
      launch_direct<Axis, kHighRows, kCols, kWordChannels>(c);
    } else if (vectorised) {
      launch_direct<Axis, kLowRows, kCols, kWordChannels>(c);
    } else if (high) {
      launch_direct<Axis, kHighRows, kCols, 1>(c);
    } else if (c.g.channels_last || c.transposed) {
      launch_direct<Axis, kLowRows, kCols, 1>(c);
    } else if constexpr (!Axis::kTransposed) {  // smaller tiles coalesce better
      launch_direct<Axis, 1, 2, 1>(c);
    }
    return true;
  });
}

template <typename T>
bool direct_l1_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_forward_axis(c.g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kStride == 2 && sizeof(T) == 2) {
      launch_direct_weight_gradient<Axis, 4, 4>(c);
    } else {
      launch_direct_weight_gradient<Axis, 8, Axis::kTaps == 3 && Axis::kStride == 1 ? 8 : 2>(c);
    }
    return true;
  });
}

template bool direct_l1(const Convolution<float>&);
template bool direct_l1(const Convolution<Half>&);
template bool direct_l1(const Convolution<BFloat16>&);
template bool direct_l1_weight_gradient(const WeightGradient<float>&);
template bool direct_l1_weight_gradient(const WeightGradient<Half>&);
template bool direct_l1_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
