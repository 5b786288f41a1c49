// large_filter: stride 1, dilation 1, any filter that fits in shared memory.
//
//      input window              zero-padded filter
//      ┌─────────────┐           ┌───────────┐
//      │  2 × 8 out  │  slides   │ b … b + 3 │      sum[2][8] += filter[b] · input[8 + 4]
//      │  ┌───────┐──┼──────►    │───────────│
//      └──┴───────┴──┘           └───────────┘
//
//   block:   one tile of outputs of one channel, of several images
//   shared:  the channel's filter and each image's input window, in float32
//   thread:  2 × 8 outputs of one image; skips filter rows that read only padding
//
// Weight gradient: the same correlation with grad_output as the filter
//   block:   one tile of taps of one channel, over a split of the images
//   shared:  grad_output and input window of blockDim.z images, in float32; at the end the sums
//   thread:  2 × 8 taps over every blockDim.z-th image; stage 1 of a two-stage reduction
#include <optional>

#include "core/choose.h"
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {
namespace {

constexpr int kMaxThreads = 256;

struct LargeFilterParams {
  int in_h, in_w, filter_h, filter_w, out_h, out_w;
  int padding_h, padding_w;
  int tile_h, tile_w;      // outputs per tile
  int tiles_h, tiles_w;    // tiles per map
  int window_h, window_w;  // staged inputs per tile
  int filter_pitch;        // row stride of the staged filter
  int images;
  ImageStrides in, filter, out;
};

constexpr int kLargeRows = 2;  // outputs per thread
constexpr int kLargeCols = 8;

inline __host__ __device__ int floor4(int x) {
  return x & ~3;
}

// Return the number of zero columns left of the staged filter: they align float4 loads. The filter
// also has a row of zeros above and below, and zeros to the right.
inline __host__ __device__ int filter_shift(int padding_w) {
  return 4 + (4 - (padding_w & 3)) % 4;
}

template <typename T>
__device__ void stage_filter(const LargeFilterParams& params, float* shared,
                             const T* __restrict__ filter, bool flip) {
  for (int r = threadIdx.y; r < params.filter_h + 2; r += blockDim.y) {
    for (int i = threadIdx.x; i < params.filter_pitch; i += blockDim.x) {
      const int a = r - 1;
      const int b = i - filter_shift(params.padding_w);
      const bool inside = a >= 0 && a < params.filter_h && b >= 0 && b < params.filter_w;
      const int h = flip ? params.filter_h - 1 - a : a;
      const int w = flip ? params.filter_w - 1 - b : b;
      shared[r * params.filter_pitch + i] =
          inside ? static_cast<float>(filter[h * params.filter.h + w * params.filter.w]) : 0.0f;
    }
  }
}

template <typename T>
__device__ void stage_window(const LargeFilterParams& params, float* shared,
                             const T* __restrict__ image, int first_h, int first_w) {
  for (int r = threadIdx.y; r < params.window_h; r += blockDim.y) {
    for (int i = threadIdx.x; i < params.window_w; i += blockDim.x) {
      const int h = first_h + r;
      const int w = first_w + i;
      const bool inside = h < params.in_h && w >= 0 && w < params.in_w;
      shared[r * params.window_w + i] =
          inside ? static_cast<float>(image[h * params.in.h + w * params.in.w]) : 0.0f;
    }
  }
}

// Accumulate outputs (h … h + 1, w … w + 7): Σ filter[a, b] · image[h − p + a, w − p + b].
__device__ inline void correlate(const LargeFilterParams& params, const float* window, int first_h,
                                 int first_w, const float* filter, int h, int w,
                                 float (&sum)[kLargeRows][kLargeCols]) {
  const int begin = max(0, h - params.padding_h);
  const int end = min(params.in_h, h + kLargeRows - 1 - params.padding_h + params.filter_h);
  const int left = w - params.padding_w;  // image column of tap 0 of the first output
  const int start = floor4(max(left, 1 - kLargeCols));
  const int taps = min(params.filter_w, params.in_w - left) - (start - left);
  const int shift = start - left + filter_shift(params.padding_w);
  for (int y = begin; y < end; ++y) {
    const float* x = window + (y - first_h) * params.window_w + start - first_w;
    // Filter row y − h + p; + 1 for the row of zeros above the filter.
    const float* f = filter + (y - h + params.padding_h + 1) * params.filter_pitch + shift;
    float in[kLargeCols + 4];
#pragma unroll
    for (int v = 0; v < kLargeCols; v += 4) {
      *reinterpret_cast<float4*>(in + v) = *reinterpret_cast<const float4*>(x + v);
    }
    for (int b = 0; b < taps; b += 4) {
      *reinterpret_cast<float4*>(in + kLargeCols) =
          *reinterpret_cast<const float4*>(x + b + kLargeCols);
      float weights[kLargeRows][4];
#pragma unroll
      for (int q = 0; q < kLargeRows; ++q) {
        *reinterpret_cast<float4*>(weights[q]) =
            *reinterpret_cast<const float4*>(f - q * params.filter_pitch + b);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int q = 0; q < kLargeRows; ++q) {
#pragma unroll
          for (int j = 0; j < kLargeCols; ++j) {
            sum[q][j] += weights[q][k] * in[j + k];
          }
        }
      }
#pragma unroll
      for (int v = 0; v < kLargeCols; ++v) {
        in[v] = in[v + 4];
      }
    }
  }
}

// Grid (images / blockDim.z, channel, tile); blockDim.x × blockDim.y threads per image.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    large_filter_kernel(LargeFilterParams params, bool flip, const T* __restrict__ in,
                        const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ out) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* shared = reinterpret_cast<float*>(memory);
  float* filter = shared;
  float* window = shared + (params.filter_h + 2) * params.filter_pitch +
                  threadIdx.z * params.window_h * params.window_w;
  const int c = blockIdx.y;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int tile_h = blockIdx.z / params.tiles_w * params.tile_h;
  const int tile_w = blockIdx.z % params.tiles_w * params.tile_w;
  const int first_h = max(0, tile_h - params.padding_h);
  const int first_w = floor4(max(tile_w - params.padding_w, 1 - kLargeCols));
  if (threadIdx.z == 0) {
    stage_filter(params, filter, weight + c * params.filter.c, flip);
  }
  if (n < params.images) {
    stage_window(params, window, in + n * params.in.n + c * params.in.c, first_h, first_w);
  }
  __syncthreads();
  if (n >= params.images) {
    return;
  }
  const int h = tile_h + threadIdx.y * kLargeRows;
  const int w = tile_w + threadIdx.x * kLargeCols;
  const float initial = bias ? static_cast<float>(bias[c]) : 0.0f;
  float sum[kLargeRows][kLargeCols];
#pragma unroll
  for (int i = 0; i < kLargeRows * kLargeCols; ++i) {
    sum[i / kLargeCols][i % kLargeCols] = initial;
  }
  correlate(params, window, first_h, first_w, filter, h, w, sum);
  T* to = out + n * params.out.n + c * params.out.c;
#pragma unroll
  for (int q = 0; q < kLargeRows; ++q) {
#pragma unroll
    for (int j = 0; j < kLargeCols; ++j) {
      if (h + q < params.out_h && w + j < params.out_w) {
        to[(h + q) * params.out.h + (w + j) * params.out.w] = static_cast<T>(sum[q][j]);
      }
    }
  }
}

// Grid (split, channel, tile of taps). Also sums grad_output for the bias gradient.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    large_filter_weight_gradient_kernel(LargeFilterParams params, const T* __restrict__ in,
                                        const T* __restrict__ grad, WeightReduction<T> reduction) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* shared = reinterpret_cast<float*>(memory);
  const int filter_size = (params.filter_h + 2) * params.filter_pitch;
  const int window_size = params.window_h * params.window_w;
  float* filter = shared + threadIdx.z * (filter_size + window_size);
  float* window = filter + filter_size;
  const int c = blockIdx.y;
  const int tile_h = blockIdx.z / params.tiles_w * params.tile_h;
  const int tile_w = blockIdx.z % params.tiles_w * params.tile_w;
  const int first_h = max(0, tile_h - params.padding_h);
  const int first_w = floor4(max(tile_w - params.padding_w, 1 - kLargeCols));
  const int h = tile_h + threadIdx.y * kLargeRows;
  const int w = tile_w + threadIdx.x * kLargeCols;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;

  float sum[kLargeRows][kLargeCols] = {};
  float grad_sum = 0;
  for (int first = blockIdx.x * blockDim.z; first < params.images;
       first += gridDim.x * blockDim.z) {
    const int64_t n = first + threadIdx.z;
    __syncthreads();
    if (n < params.images) {
      stage_filter(params, filter, grad + n * params.filter.n + c * params.filter.c, false);
      stage_window(params, window, in + n * params.in.n + c * params.in.c, first_h, first_w);
    }
    __syncthreads();
    if (n < params.images) {
      for (int i = thread; i < filter_size; i += threads) {
        grad_sum += filter[i];
      }
      correlate(params, window, first_h, first_w, filter, h, w, sum);
    }
  }

  // Reduce over threadIdx.z in order. Shared memory: tile of taps, then one bias sum per thread.
  const int tile = params.tile_h * params.tile_w;
  for (int z = 0; z < blockDim.z; ++z) {
    __syncthreads();
    if (threadIdx.z == z) {
      for (int q = 0; q < kLargeRows; ++q) {
        for (int j = 0; j < kLargeCols; ++j) {
          float* to = shared + (h - tile_h + q) * params.tile_w + w - tile_w + j;
          *to = z == 0 ? sum[q][j] : *to + sum[q][j];
        }
      }
      shared[tile + thread] = z == 0 ? grad_sum : shared[tile + thread] + grad_sum;
    }
  }
  __syncthreads();
  const int taps = params.out_h * params.out_w;
  BlockSums<T> to(reduction, blockIdx.x, c);
  for (int i = threadIdx.z * threads + thread; i < tile; i += threads * blockDim.z) {
    const int a = tile_h + i / params.tile_w;
    const int b = tile_w + i % params.tile_w;
    if (a < params.out_h && b < params.out_w) {
      to.put(a * params.out_w + b, shared[i]);
    }
  }
  if (blockIdx.z == 0 && thread == 0 && threadIdx.z == 0) {
    float total = 0;
    for (int i = 0; i < threads; ++i) {
      total += shared[tile + i];
    }
    to.put(taps, total);
  }
}

bool has_unit_stride_and_dilation(const DepthwiseGeometry& g) {
  return g.stride_h == 1 && g.stride_w == 1 && g.dilation_h == 1 && g.dilation_w == 1;
}

ImageStrides strides_of(const DepthwiseGeometry& g, int64_t h, int64_t w) {
  return image_strides(g.channels_last, g.c, h, w);
}

struct LargeFilterPlan {
  LargeFilterParams params;
  dim3 block;
  int64_t tiles;
  size_t shared;
};

// Choose the tile size and the images per block. `shared_filter`: one filter per block, else one
// per image. Return nothing if the filter and window of one image exceed shared memory.
std::optional<LargeFilterPlan> plan_large_filter(int64_t images, int64_t in_h, int64_t in_w,
                                                 int64_t filter_h, int64_t filter_w,
                                                 int64_t padding_h, int64_t padding_w,
                                                 bool shared_filter) {
  LargeFilterParams params{};
  params.in_h = in_h, params.in_w = in_w;
  params.filter_h = filter_h, params.filter_w = filter_w;
  params.out_h = in_h + 2 * padding_h - filter_h + 1;
  params.out_w = in_w + 2 * padding_w - filter_w + 1;
  params.padding_h = padding_h, params.padding_w = padding_w;
  params.images = images;
  params.filter_pitch = round_up(filter_shift(padding_w) + filter_w + 4, 4);
  const size_t filter = sizeof(float) * (filter_h + 2) * params.filter_pitch;
  for (int max_tile = 64; max_tile >= 8; max_tile /= 2) {
    params.tiles_h = ceil_div(params.out_h, max_tile),
    params.tiles_w = ceil_div(params.out_w, max_tile);
    params.tile_h = round_up(ceil_div(params.out_h, params.tiles_h), kLargeRows);
    params.tile_w = round_up(ceil_div(params.out_w, params.tiles_w), kLargeCols);
    params.window_h = std::min<int64_t>(params.tile_h + filter_h - 1, in_h);
    params.window_w = round_up(std::min<int64_t>(params.tile_w + filter_w, in_w + 12) + 20, 4);
    const size_t window = sizeof(float) * params.window_h * params.window_w;
    const int threads = params.tile_h / kLargeRows * params.tile_w / kLargeCols;
    const size_t common_bytes = shared_filter ? filter : 0;
    const size_t image_bytes = window + filter - common_bytes;
    const size_t sums = sizeof(float) * (params.tile_h * params.tile_w + threads);
    if (threads > kMaxThreads || std::max(common_bytes + image_bytes, sums) > kSharedBytes) {
      continue;
    }
    const int64_t z = std::min({int64_t{kMaxThreads / threads}, images, int64_t{64},
                                static_cast<int64_t>((kSharedBytes - common_bytes) / image_bytes)});
    return LargeFilterPlan{params, dim3(params.tile_w / kLargeCols, params.tile_h / kLargeRows, z),
                           int64_t{params.tiles_h} * params.tiles_w,
                           std::max(common_bytes + z * image_bytes, sums)};
  }
  return std::nullopt;
}

}  // namespace

template <typename T>
bool large_filter(const Convolution<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!has_unit_stride_and_dilation(g)) {
    return false;
  }
  auto plan = plan_large_filter(g.n, c.in.h, c.in.w, g.kernel_h, g.kernel_w, c.padding_h,
                                c.padding_w, true);
  if (!plan) {
    return false;
  }
  plan->params.in = strides_of(g, c.in.h, c.in.w);
  plan->params.filter = {0, g.kernel_h * g.kernel_w, g.kernel_w, 1};
  plan->params.out = strides_of(g, c.out.h, c.out.w);
  c.launch(large_filter_kernel<T>, dim3(ceil_div(g.n, plan->block.z), g.c, plan->tiles),
           plan->block, plan->shared, plan->params, c.flip, c.in.data, c.weight, c.bias,
           c.out.data);
  return true;
}

template <typename T>
bool large_filter_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  if (!has_unit_stride_and_dilation(g)) {
    return false;
  }
  auto plan = plan_large_filter(g.n, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, false);
  if (!plan) {
    return false;
  }
  plan->params.in = strides_of(g, g.h, g.w);
  plan->params.filter = strides_of(g, g.out_h, g.out_w);
  const int64_t steps = ceil_div(g.n, plan->block.z);
  const int64_t resident_blocks = 4 * Device().multiprocessors;
  const int64_t splits = choose_splits(steps, g.c * plan->tiles, resident_blocks, 1);
  reduce_weights(c, splits, [&](const WeightReduction<T>& reduction) {
    launch_kernel(large_filter_weight_gradient_kernel<T>, dim3(splits, g.c, plan->tiles),
                  plan->block, plan->shared, c.stream, plan->params, c.x, c.grad, reduction);
  });
  return true;
}

template bool large_filter(const Convolution<float>&);
template bool large_filter_weight_gradient(const WeightGradient<float>&);
template bool large_filter(const Convolution<Half>&);
template bool large_filter_weight_gradient(const WeightGradient<Half>&);
template bool large_filter(const Convolution<BFloat16>&);
template bool large_filter_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
