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

#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::depthwise_conv2d {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kMaxGrid = 65536;  // exclusive limit of blocks along y and z
constexpr int kRows = 2, kCols = 8, kOutputs = kRows * kCols;  // of a thread

// Size and strides of the images, filters or outputs.
struct Maps {
  int h, w;
  ImageStrides strides;
};

Maps maps(const Geometry& g, int64_t h, int64_t w) {
  return {static_cast<int>(h), static_cast<int>(w), image_strides(g.channels_last, g.c, h, w)};
}

struct LargeFilterParams {
  Maps in, filter, out;
  int padding_h, padding_w;
  int tile_h, tile_w;      // outputs per tile
  int tiles_h, tiles_w;    // tiles per map
  int window_h, window_w;  // staged inputs per tile
  int filter_pitch;        // row stride of the staged filter
  int images;

  __device__ int filter_size() const { return (filter.h + 2) * filter_pitch; }
  __device__ int window_size() const { return window_h * window_w; }
};

inline __host__ __device__ int floor4(int x) {
  return x & ~3;
}

// Return the number of zero columns left of the staged filter: they align float4 loads. The filter
// also has a row of zeros above and below, and zeros to the right.
inline __host__ __device__ int filter_shift(int padding_w) {
  return 4 + (4 - (padding_w & 3)) % 4;
}

// Stage a rectangle of a map from (first_h, first_w) on; elements outside the map are zero.
template <typename T>
__device__ void stage(float* to, int height, int width, const T* from, const Maps& map, int first_h,
                      int first_w) {
  for (int r = threadIdx.y; r < height; r += blockDim.y) {
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      const int h = first_h + r, w = first_w + i;
      const bool inside = is_inside(h, map.h) && is_inside(w, map.w);
      to[r * width + i] =
          inside ? static_cast<float>(from[h * map.strides.h + w * map.strides.w]) : 0.0f;
    }
  }
}

// A block's tile and its thread's outputs (h … h + 1, w … w + 7).
struct Tile {
  int top, left;         // first output of the tile
  int first_h, first_w;  // first input of the window
  int h, w;

  __device__ explicit Tile(const LargeFilterParams& params)
      : top(blockIdx.z / params.tiles_w * params.tile_h),
        left(blockIdx.z % params.tiles_w * params.tile_w),
        first_h(max(0, top - params.padding_h)),
        first_w(floor4(max(left - params.padding_w, 1 - kCols))),
        h(top + threadIdx.y * kRows),
        w(left + threadIdx.x * kCols) {}

  template <typename T>
  __device__ void stage_filter(const LargeFilterParams& params, float* to, const T* filter) const {
    stage(to, params.filter.h + 2, params.filter_pitch, filter, params.filter, -1,
          -filter_shift(params.padding_w));
  }
  template <typename T>
  __device__ void stage_window(const LargeFilterParams& params, float* to, const T* image) const {
    stage(to, params.window_h, params.window_w, image, params.in, first_h, first_w);
  }

  // Accumulate the thread's outputs: Σ filter[a, b] · image[h − p + a, w − p + b].
  template <int kSums>
  __device__ void correlate(const LargeFilterParams& params, const float* filter,
                            const float* window, float (&sum)[kSums][1]) const {
    const int begin = max(0, h - params.padding_h);
    const int end = min(params.in.h, h + kRows - 1 - params.padding_h + params.filter.h);
    const int left = w - params.padding_w;  // image column of tap 0 of the first output
    const int start = floor4(max(left, 1 - kCols));
    const int taps = min(params.filter.w, params.in.w - left) - (start - left);
    const int shift = start - left + filter_shift(params.padding_w);
    for (int y = begin; y < end; ++y) {
      const float* x = window + (y - first_h) * params.window_w + start - first_w;
      // Filter row y − h + p; + 1 for the row of zeros above the filter.
      const float* f = filter + (y - h + params.padding_h + 1) * params.filter_pitch + shift;
      float in[kCols + 4];
#pragma unroll
      for (int v = 0; v < kCols; v += 4) {
        *reinterpret_cast<float4*>(in + v) = *reinterpret_cast<const float4*>(x + v);
      }
      for (int b = 0; b < taps; b += 4) {
        *reinterpret_cast<float4*>(in + kCols) = *reinterpret_cast<const float4*>(x + b + kCols);
        float weights[kRows][4];
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          *reinterpret_cast<float4*>(weights[q]) =
              *reinterpret_cast<const float4*>(f - q * params.filter_pitch + b);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int q = 0; q < kRows; ++q) {
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
              sum[q * kCols + j][0] += weights[q][k] * in[j + k];
            }
          }
        }
#pragma unroll
        for (int v = 0; v < kCols; ++v) {
          in[v] = in[v + 4];
        }
      }
    }
  }
};

// Grid (images / blockDim.z, channel, tile); blockDim.x × blockDim.y threads per image.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    large_filter_kernel(LargeFilterParams params, const T* __restrict__ in,
                        const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ out) {
  extern __shared__ __align__(16) float shared[];
  float* window = shared + params.filter_size() + threadIdx.z * params.window_size();
  const Tile tile(params);
  const int c = blockIdx.y;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (threadIdx.z == 0) {
    tile.stage_filter(params, shared, weight + c * params.filter.strides.c);
  }
  if (n < params.images) {
    tile.stage_window(params, window, in + n * params.in.strides.n + c * params.in.strides.c);
  }
  __syncthreads();
  if (n >= params.images) {
    return;
  }
  const float initial = bias ? static_cast<float>(bias[c]) : 0.0f;
  float sum[kOutputs][1];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    sum[i][0] = initial;
  }
  tile.correlate(params, shared, window, sum);
  const ImageStrides& strides = params.out.strides;
  T* to = out + n * strides.n + c * strides.c;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int h = tile.h + i / kCols, w = tile.w + i % kCols;
    if (h < params.out.h && w < params.out.w) {
      to[h * strides.h + w * strides.w] = static_cast<T>(sum[i][0]);
    }
  }
}

// Grid (split, channel, tile of taps). Also sums grad_output for the bias gradient.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    large_filter_weight_gradient_kernel(LargeFilterParams params, const T* __restrict__ in,
                                        const T* __restrict__ grad, WeightReduction<T> reduction) {
  extern __shared__ __align__(16) float shared[];
  float* filter = shared + threadIdx.z * (params.filter_size() + params.window_size());
  float* window = filter + params.filter_size();
  const Tile tile(params);
  const int c = blockIdx.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  constexpr int kSums = kOutputs + 1;
  float sum[kSums][1] = {};
  for (int first = blockIdx.x * blockDim.z; first < params.images;
       first += gridDim.x * blockDim.z) {
    const int64_t n = first + threadIdx.z;
    __syncthreads();
    if (n < params.images) {
      tile.stage_filter(params, filter,
                        grad + n * params.filter.strides.n + c * params.filter.strides.c);
      tile.stage_window(params, window, in + n * params.in.strides.n + c * params.in.strides.c);
    }
    __syncthreads();
    if (n < params.images) {
      for (int i = thread; i < params.filter_size(); i += threads) {
        sum[kOutputs][0] += filter[i];
      }
      tile.correlate(params, filter, window, sum);
    }
  }

  __syncthreads();
  reduce_block(sum, shared, thread, threads, threadIdx.z, blockDim.z);
  for (int i = flat_thread(); i < threads * kOutputs; i += threads * blockDim.z) {
    const int owner = i / kOutputs, tap = i % kOutputs;
    const int h = tile.top + owner / blockDim.x * kRows + tap / kCols;
    const int w = tile.left + owner % blockDim.x * kCols + tap % kCols;
    if (h < params.out.h && w < params.out.w) {
      reduction.put(blockIdx.x, c, h * params.out.w + w, shared[owner * kSums + tap]);
    }
  }
  if (blockIdx.z == 0 && flat_thread() == 0) {
    float total = 0;
    for (int i = 0; i < threads; ++i) {
      total += shared[i * kSums + kOutputs];
    }
    reduction.put(blockIdx.x, c, reduction.taps, total);
  }
}

struct LargeFilterPlan {
  LargeFilterParams params;
  dim3 block;
  size_t shared;
};

// Choose the tile size and the images per block. `shared_filter`: one filter per block, else one
// per image. Return nullopt if stride or dilation is not 1, if filter and window of one image
// exceed shared memory, or if channels or tiles exceed the grid.
std::optional<LargeFilterPlan> plan_large_filter(const Geometry& g, const Maps& in,
                                                 const Maps& filter, const Maps& out,
                                                 int64_t padding_h, int64_t padding_w,
                                                 bool shared_filter) {
  if (g.stride_h != 1 || g.stride_w != 1 || g.dilation_h != 1 || g.dilation_w != 1) {
    return std::nullopt;
  }
  LargeFilterParams params{in, filter, out};
  params.padding_h = padding_h, params.padding_w = padding_w;
  params.images = g.n;
  params.filter_pitch = round_up(filter_shift(padding_w) + filter.w + 4, 4);
  const int64_t filter_bytes = sizeof(float) * (filter.h + 2) * params.filter_pitch;
  for (int max_tile = 64; max_tile >= 8; max_tile /= 2) {
    params.tiles_h = ceil_div(out.h, max_tile), params.tiles_w = ceil_div(out.w, max_tile);
    params.tile_h = round_up(ceil_div(out.h, params.tiles_h), kRows);
    params.tile_w = round_up(ceil_div(out.w, params.tiles_w), kCols);
    params.window_h = std::min(params.tile_h + filter.h - 1, in.h);
    params.window_w = round_up(std::min(params.tile_w + filter.w, in.w + 12) + 20, 4);
    const int64_t window_bytes = sizeof(float) * params.window_h * params.window_w;
    const int64_t common_bytes = shared_filter ? filter_bytes : 0;
    const int64_t image_bytes = window_bytes + filter_bytes - common_bytes;
    const dim3 block(params.tile_w / kCols, params.tile_h / kRows);
    const int64_t threads = block.x * block.y;
    const int64_t images = std::min({kMaxThreads / threads, g.n, int64_t{64},
                                     (int64_t{kSharedBytes} - common_bytes) / image_bytes});
    if (images > 0 && g.c < kMaxGrid && int64_t{params.tiles_h} * params.tiles_w < kMaxGrid) {
      const size_t sums = sizeof(float) * reduction_elements(threads, images, kOutputs + 1);
      return LargeFilterPlan{params, dim3(block.x, block.y, images),
                             std::max<size_t>(common_bytes + images * image_bytes, sums)};
    }
  }
  return std::nullopt;
}

}  // namespace

template <typename T>
bool large_filter(const Convolution<T>& c) {
  const Geometry& g = c.g;
  const int64_t taps = g.kernel_h * g.kernel_w, direction = c.flip ? -1 : 1;
  const auto plan = plan_large_filter(
      g, maps(g, c.in.h, c.in.w),
      {int(g.kernel_h), int(g.kernel_w), {0, taps, direction * g.kernel_w, direction}},
      maps(g, c.out.h, c.out.w), c.padding_h, c.padding_w, true);
  if (plan) {
    const LargeFilterParams& params = plan->params;
    c.launch(large_filter_kernel<T>,
             dim3(ceil_div(g.n, plan->block.z), g.c, params.tiles_h * params.tiles_w), plan->block,
             plan->shared, params, c.in.data, c.flip ? c.weight + taps - 1 : c.weight, c.bias,
             c.out.data);
  }
  return plan.has_value();
}

template <typename T>
bool large_filter_weight_gradient(const WeightGradient<T>& c) {
  const Geometry& g = c.g;
  const auto plan =
      plan_large_filter(g, maps(g, g.h, g.w), maps(g, g.out_h, g.out_w),
                        maps(g, g.kernel_h, g.kernel_w), g.padding_h, g.padding_w, false);
  if (plan) {
    const LargeFilterParams& params = plan->params;
    const int64_t tiles = params.tiles_h * params.tiles_w;
    const int64_t resident_blocks = 4 * Device().multiprocessors;
    const int64_t splits =
        choose_splits(ceil_div(g.n, plan->block.z), g.c * tiles, resident_blocks, 1);
    reduce_weights(c, splits, [&](const WeightReduction<T>& reduction) {
      launch_kernel(large_filter_weight_gradient_kernel<T>, dim3(splits, g.c, tiles), plan->block,
                    plan->shared, c.stream, params, c.x, c.grad, reduction);
    });
  }
  return plan.has_value();
}

template bool large_filter(const Convolution<float>&);
template bool large_filter(const Convolution<Half>&);
template bool large_filter(const Convolution<BFloat16>&);
template bool large_filter_weight_gradient(const WeightGradient<float>&);
template bool large_filter_weight_gradient(const WeightGradient<Half>&);
template bool large_filter_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::depthwise_conv2d
