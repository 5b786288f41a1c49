// Gradients of depthwise convolution with respect to weight and bias: sums over all images. Each
// block sums some images of one channel (or chunk of channels) into partial sums, a second kernel
// adds those up in a fixed order: no atomics, the same bits every run.
#pragma once

#include "depthwise_nchw.cuh"
#include "depthwise_nhwc.cuh"

namespace ops::cuda {

// partial [splits, channels, taps + 1]; the last of taps + 1 is the bias.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    sum_partials_kernel(const float* __restrict__ partial, int splits, int channels, int taps,
                        T* __restrict__ grad_weight, T* __restrict__ grad_bias) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int size = channels * (taps + 1);
  if (i >= size) {
    return;
  }
  float sum = 0;
  for (int s = 0; s < splits; ++s) {
    sum += partial[static_cast<int64_t>(s) * size + i];
  }
  const int c = i / (taps + 1);
  const int tap = i % (taps + 1);
  if (tap < taps) {
    grad_weight[c * taps + tap] = static_cast<T>(sum);
  } else if (grad_bias) {
    grad_bias[c] = static_cast<T>(sum);
  }
}

// Block (c, split) goes through its images, planes_per_block at a time.
template <typename Axis, typename T>
__global__ void __launch_bounds__(kMaxThreads)
    plane_weight_kernel(PlaneLaunch launch, int grad_vector, int64_t images, int splits,
                        const T* __restrict__ x, const T* __restrict__ grad,
                        float* __restrict__ partial) {
  using Stencil = PlaneStencil<Axis>;
  constexpr int kRows = Stencil::kRows, kCols = Stencil::kCols, kTaps = Stencil::kTaps;
  extern __shared__ __align__(16) unsigned char shared[];
  const int window_size = launch.window_h * launch.window_w;
  T* windows = reinterpret_cast<T*>(shared);
  T* grads = windows + launch.planes_per_block * window_size;

  const int c = blockIdx.x;
  const int64_t in_size = static_cast<int64_t>(launch.in_h) * launch.in_w;
  const int64_t out_size = static_cast<int64_t>(launch.out_h) * launch.out_w;
  const int across = launch.tile_w / kCols;
  const int down = launch.tile_h / kRows;
  const int p = threadIdx.x / (across * down);
  const int row = threadIdx.x / across % down * kRows;
  const int col = threadIdx.x % across * kCols;
  const T* window =
      windows + (p * launch.window_h + Axis::step(row)) * launch.window_w + Axis::step(col);
  const T* outputs = grads + (p * launch.tile_h + row) * launch.tile_w + col;

  float sum[kTaps + 1] = {};
  const int64_t per_step = static_cast<int64_t>(splits) * launch.planes_per_block;
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * launch.planes_per_block; first < images;
       first += per_step) {
    const int planes =
        static_cast<int>(min(static_cast<int64_t>(launch.planes_per_block), images - first));
    for (int tile = 0; tile < launch.tiles_h * launch.tiles_w; ++tile) {
      const int tile_h = tile / launch.tiles_w * launch.tile_h;
      const int tile_w = tile % launch.tiles_w * launch.tile_w;
      __syncthreads();
      stage(
          launch.load_vector, windows, x,
          [=](int i) { return ((first + i) * launch.channels + c) * in_size; }, planes,
          launch.in_h, launch.in_w, launch.first_h + Axis::step(tile_h),
          launch.first_w + Axis::step(tile_w), launch.window_h, launch.window_w);
      stage(
          grad_vector, grads, grad,
          [=](int i) { return ((first + i) * launch.channels + c) * out_size; }, planes,
          launch.out_h, launch.out_w, tile_h, tile_w, launch.tile_h, launch.tile_w);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncthreads();
      if (p >= planes) {
        continue;
      }
      float g[kRows][kCols];
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        const auto four = *reinterpret_cast<const Vector<T, 4>*>(outputs + q * launch.tile_w);
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          g[q][j] = static_cast<float>(four.lane[j]);
          sum[kTaps] += g[q][j];
        }
      }
#pragma unroll
      for (int r = 0; r < Stencil::kInRows; ++r) {
        float in[Stencil::kVectors * 4];
#pragma unroll
        for (int v = 0; v < Stencil::kVectors; ++v) {
          const auto four =
              *reinterpret_cast<const Vector<T, 4>*>(window + r * launch.window_w + v * 4);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            in[v * 4 + k] = static_cast<float>(four.lane[k]);
          }
        }
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          const int a = Axis::tap(q, r);
          if (a < 0) {
            continue;
          }
#pragma unroll
          for (int i = 0; i < Axis::inputs(kCols); ++i) {
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
              const int b = Axis::tap(j, i);
              if (b >= 0) {
                sum[a * Axis::kTaps + b] += g[q][j] * in[Stencil::kLead + i];
              }
            }
          }
        }
      }
    }
  }

  // Over the lanes of each warp, then over the warps.
  __syncthreads();
  float* by_warp = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i <= kTaps; ++i) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      sum[i] += __shfl_down_sync(~0u, sum[i], lanes);
    }
    if (threadIdx.x % 32 == 0) {
      by_warp[threadIdx.x / 32 * (kTaps + 1) + i] = sum[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i <= kTaps; i += blockDim.x) {
    float total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) {
      total += by_warp[warp * (kTaps + 1) + i];
    }
    partial[(static_cast<int64_t>(blockIdx.y) * launch.channels + c) * (kTaps + 1) + i] = total;
  }
}

// A thread of image_weight_kernel sums all taps of kLanes channels over windows of kRows × kCols.
template <typename Axis>
struct ImageWeightStencil {
  static constexpr int kRows = 2;
  static constexpr int kCols = 4;
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  static constexpr int kLanes = kTaps <= 9 ? 4 : (kTaps <= 25 ? 2 : 1);  // by registers
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kInCols = Axis::inputs(kCols);
};

// Block (chunk, split) goes through its tiles of all images.
template <typename Axis, typename T>
__global__ void __launch_bounds__(kMaxThreads)
    image_weight_kernel(ImageLaunch launch, int64_t tiles, int splits, const T* __restrict__ x,
                        const T* __restrict__ grad, float* __restrict__ partial) {
  using Stencil = ImageWeightStencil<Axis>;
  constexpr int kRows = Stencil::kRows, kCols = Stencil::kCols, kTaps = Stencil::kTaps;
  constexpr int kLanes = Stencil::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  const int pitch = launch.lanes * kChannels;
  T* window = reinterpret_cast<T*>(shared);
  T* outputs = window + launch.window_h * launch.window_w * pitch;
  const int first_channel = blockIdx.x * pitch;
  const int count = min(pitch, launch.channels - first_channel);

  const int per_pixel = pitch / kLanes;  // threads across the chunk
  const int c = threadIdx.x % per_pixel * kLanes;
  const int slot = threadIdx.x / per_pixel;
  const int slots = blockDim.x / per_pixel;
  const int tile_w = launch.across * kCols;
  const int tile_h = launch.down * kRows;

  float sum[kTaps + 1][kLanes] = {};
  for (int64_t tile = blockIdx.y; tile < tiles; tile += splits) {
    const int w0 = tile % launch.tiles_w * tile_w;
    const int h0 = tile / launch.tiles_w % launch.tiles_h * tile_h;
    const int64_t n = tile / launch.tiles_w / launch.tiles_h;
    __syncthreads();
    stage_image(launch, window, x + n * launch.in_h * launch.in_w * launch.channels + first_channel,
                launch.in_h, launch.in_w, launch.first_h + Axis::step(h0),
                launch.first_w + Axis::step(w0), launch.window_h, launch.window_w, count);
    stage_image(launch, outputs,
                grad + n * launch.out_h * launch.out_w * launch.channels + first_channel,
                launch.out_h, launch.out_w, h0, w0, tile_h, tile_w, count);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    for (int item = slot; item < launch.across * launch.down; item += slots) {
      const int col = item % launch.across * kCols;
      const int row = item / launch.across * kRows;
      float g[kRows][kCols][kLanes];
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const auto pixel = *reinterpret_cast<const Vector<T, kLanes>*>(
              outputs + ((row + q) * tile_w + col + j) * pitch + c);
#pragma unroll
          for (int v = 0; v < kLanes; ++v) {
            g[q][j][v] = static_cast<float>(pixel.lane[v]);
            sum[kTaps][v] += g[q][j][v];
          }
        }
      }
      const T* from = window + (Axis::step(row) * launch.window_w + Axis::step(col)) * pitch + c;
#pragma unroll
      for (int r = 0; r < Stencil::kInRows; ++r) {
#pragma unroll
        for (int i = 0; i < Stencil::kInCols; ++i) {
          const auto pixel = *reinterpret_cast<const Vector<T, kLanes>*>(
              from + (r * launch.window_w + i) * pitch);
#pragma unroll
          for (int q = 0; q < kRows; ++q) {
            const int a = Axis::tap(q, r);
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
              const int b = Axis::tap(j, i);
              if (a >= 0 && b >= 0) {
#pragma unroll
                for (int v = 0; v < kLanes; ++v) {
                  sum[a * Axis::kTaps + b][v] += g[q][j][v] * static_cast<float>(pixel.lane[v]);
                }
              }
            }
          }
        }
      }
    }
  }

  // Over the slots, one after the other.
  float* total = reinterpret_cast<float*>(shared);  // [kTaps + 1][pitch]
  for (int s = 0; s < slots; ++s) {
    __syncthreads();
    if (slot == s) {
#pragma unroll
      for (int i = 0; i <= kTaps; ++i) {
#pragma unroll
        for (int v = 0; v < kLanes; ++v) {
          float* to = total + i * pitch + c + v;
          *to = s == 0 ? sum[i][v] : *to + sum[i][v];
        }
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * (kTaps + 1); i += blockDim.x) {
    const int64_t channel = first_channel + i / (kTaps + 1);
    partial[(static_cast<int64_t>(blockIdx.y) * launch.channels + channel) * (kTaps + 1) +
            i % (kTaps + 1)] = total[i % (kTaps + 1) * pitch + i / (kTaps + 1)];
  }
}

}  // namespace ops::cuda
