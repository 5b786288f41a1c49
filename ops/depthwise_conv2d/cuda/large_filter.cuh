// Depthwise convolution with stride 1 and any filter, made for large ones: image and filter lie in
// shared memory, a thread slides along both and skips what the image's edge hides. The gradient of
// the weight is the same correlation, with grad_output for the filter.
#pragma once

#include "depthwise_conv2d/cuda/tap_maps.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {

struct LargeLaunch {
  int in_h, in_w, filter_h, filter_w, out_h, out_w;
  int padding_h, padding_w;
  int tile_h, tile_w;      // outputs a tile
  int tiles_h, tiles_w;    // tiles a plane
  int window_h, window_w;  // inputs staged a tile
  int filter_pitch;
  int images;
  ImageStrides in, filter, out;
};

constexpr int kLargeRows = 2;  // a thread's outputs
constexpr int kLargeCols = 8;

inline __host__ __device__ int floor4(int x) {
  return x & ~3;
}

// Staged filters have a row of zeros above and below, and columns of zeros on both sides; their
// column b lies so that the first tap that a thread reads is a multiple of 4.
inline __host__ __device__ int filter_shift(int padding_w) {
  return 4 + (4 - (padding_w & 3)) % 4;
}

template <typename T>
__device__ void stage_filter(const LargeLaunch& launch, float* shared, const T* __restrict__ filter,
                             bool flip) {
  for (int r = threadIdx.y; r < launch.filter_h + 2; r += blockDim.y) {
    for (int i = threadIdx.x; i < launch.filter_pitch; i += blockDim.x) {
      const int a = r - 1;
      const int b = i - filter_shift(launch.padding_w);
      const bool inside = a >= 0 && a < launch.filter_h && b >= 0 && b < launch.filter_w;
      const int h = flip ? launch.filter_h - 1 - a : a;
      const int w = flip ? launch.filter_w - 1 - b : b;
      shared[r * launch.filter_pitch + i] =
          inside ? static_cast<float>(filter[h * launch.filter.h + w * launch.filter.w]) : 0.0f;
    }
  }
}

template <typename T>
__device__ void stage_window(const LargeLaunch& launch, float* shared, const T* __restrict__ image,
                             int first_h, int first_w) {
  for (int r = threadIdx.y; r < launch.window_h; r += blockDim.y) {
    for (int i = threadIdx.x; i < launch.window_w; i += blockDim.x) {
      const int h = first_h + r;
      const int w = first_w + i;
      const bool inside = h < launch.in_h && w >= 0 && w < launch.in_w;
      shared[r * launch.window_w + i] =
          inside ? static_cast<float>(image[h * launch.in.h + w * launch.in.w]) : 0.0f;
    }
  }
}

// Adds to sum what outputs (h … h + 1, w … w + 7) are: Σ filter[a, b] · image[h − p + a, w − p +
// b].
__device__ inline void correlate(const LargeLaunch& launch, const float* window, int first_h,
                                 int first_w, const float* filter, int h, int w,
                                 float (&sum)[kLargeRows][kLargeCols]) {
  const int begin = max(0, h - launch.padding_h);
  const int end = min(launch.in_h, h + kLargeRows - 1 - launch.padding_h + launch.filter_h);
  const int left = w - launch.padding_w;  // the image column under tap 0 of the first output
  const int start = floor4(max(left, 1 - kLargeCols));
  const int taps = min(launch.filter_w, launch.in_w - left) - (start - left);
  const int shift = start - left + filter_shift(launch.padding_w);
  for (int y = begin; y < end; ++y) {
    const float* x = window + (y - first_h) * launch.window_w + start - first_w;
    // Row y − h + p of the filter, one further down because of the row of zeros.
    const float* f = filter + (y - h + launch.padding_h + 1) * launch.filter_pitch + shift;
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
            *reinterpret_cast<const float4*>(f - q * launch.filter_pitch + b);
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

// Block (group of images, channel, tile): every image has blockDim.x × blockDim.y threads.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    large_kernel(LargeLaunch launch, bool flip, const T* __restrict__ in,
                 const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* shared = reinterpret_cast<float*>(memory);
  float* filter = shared;
  float* window = shared + (launch.filter_h + 2) * launch.filter_pitch +
                  threadIdx.z * launch.window_h * launch.window_w;
  const int c = blockIdx.y;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int tile_h = blockIdx.z / launch.tiles_w * launch.tile_h;
  const int tile_w = blockIdx.z % launch.tiles_w * launch.tile_w;
  const int first_h = max(0, tile_h - launch.padding_h);
  const int first_w = floor4(max(tile_w - launch.padding_w, 1 - kLargeCols));
  if (threadIdx.z == 0) {
    stage_filter(launch, filter, weight + c * launch.filter.c, flip);
  }
  if (n < launch.images) {
    stage_window(launch, window, in + n * launch.in.n + c * launch.in.c, first_h, first_w);
  }
  __syncthreads();
  if (n >= launch.images) {
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
  correlate(launch, window, first_h, first_w, filter, h, w, sum);
  T* to = out + n * launch.out.n + c * launch.out.c;
#pragma unroll
  for (int q = 0; q < kLargeRows; ++q) {
#pragma unroll
    for (int j = 0; j < kLargeCols; ++j) {
      if (h + q < launch.out_h && w + j < launch.out_w) {
        to[(h + q) * launch.out.h + (w + j) * launch.out.w] = static_cast<T>(sum[q][j]);
      }
    }
  }
}

// The outputs are taps here. Block (split, channel, tile) goes through its images, blockDim.z at a
// time, and sums up grad_output itself, too.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    large_weight_kernel(LargeLaunch launch, const T* __restrict__ in, const T* __restrict__ grad,
                        WeightTotals<T> totals) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* shared = reinterpret_cast<float*>(memory);
  const int filter_size = (launch.filter_h + 2) * launch.filter_pitch;
  const int window_size = launch.window_h * launch.window_w;
  float* filter = shared + threadIdx.z * (filter_size + window_size);
  float* window = filter + filter_size;
  const int c = blockIdx.y;
  const int tile_h = blockIdx.z / launch.tiles_w * launch.tile_h;
  const int tile_w = blockIdx.z % launch.tiles_w * launch.tile_w;
  const int first_h = max(0, tile_h - launch.padding_h);
  const int first_w = floor4(max(tile_w - launch.padding_w, 1 - kLargeCols));
  const int h = tile_h + threadIdx.y * kLargeRows;
  const int w = tile_w + threadIdx.x * kLargeCols;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;

  float sum[kLargeRows][kLargeCols] = {};
  float grad_sum = 0;
  for (int first = blockIdx.x * blockDim.z; first < launch.images;
       first += gridDim.x * blockDim.z) {
    const int64_t n = first + threadIdx.z;
    __syncthreads();
    if (n < launch.images) {
      stage_filter(launch, filter, grad + n * launch.filter.n + c * launch.filter.c, false);
      stage_window(launch, window, in + n * launch.in.n + c * launch.in.c, first_h, first_w);
    }
    __syncthreads();
    if (n < launch.images) {
      for (int i = thread; i < filter_size; i += threads) {
        grad_sum += filter[i];
      }
      correlate(launch, window, first_h, first_w, filter, h, w, sum);
    }
  }

  // Over blockDim.z, one after the other, in shared memory that holds the tile and a bias a thread.
  const int tile = launch.tile_h * launch.tile_w;
  for (int z = 0; z < blockDim.z; ++z) {
    __syncthreads();
    if (threadIdx.z == z) {
      for (int q = 0; q < kLargeRows; ++q) {
        for (int j = 0; j < kLargeCols; ++j) {
          float* to = shared + (h - tile_h + q) * launch.tile_w + w - tile_w + j;
          *to = z == 0 ? sum[q][j] : *to + sum[q][j];
        }
      }
      shared[tile + thread] = z == 0 ? grad_sum : shared[tile + thread] + grad_sum;
    }
  }
  __syncthreads();
  const int taps = launch.out_h * launch.out_w;
  BlockTotals<T> to(totals, blockIdx.x, c, taps + 1);
  for (int i = threadIdx.z * threads + thread; i < tile; i += threads * blockDim.z) {
    const int a = tile_h + i / launch.tile_w;
    const int b = tile_w + i % launch.tile_w;
    if (a < launch.out_h && b < launch.out_w) {
      to.put(a * launch.out_w + b, shared[i]);
    }
  }
  if (blockIdx.z == 0 && thread == 0 && threadIdx.z == 0) {
    float total = 0;
    for (int i = 0; i < threads; ++i) {
      total += shared[tile + i];
    }
    to.put(taps, total);
  }
  to.finish(taps + 1);
}

}  // namespace ops::cuda
