// Gradients of depthwise convolution with respect to weight and bias: sums over all images. Each
// block sums some images of one channel (or chunk of channels) into partial sums, a second kernel
// adds those up in a fixed order: no atomics, the same bits every run.
#pragma once

#include "depthwise_nchw.cuh"
#include "depthwise_nhwc.cuh"

namespace ops::cuda {

// partial [splits, channels, taps + 1], the last of taps + 1 is the bias. A column of kSumRows
// threads adds up one sum, each of them every kSumRows-th split.
constexpr int kSumColumns = 32, kSumRows = 16;

template <typename T>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_partials_kernel(const float* __restrict__ partial, int splits, int channels, int taps,
                        T* __restrict__ grad_weight, T* __restrict__ grad_bias) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int i = blockIdx.x * kSumColumns + threadIdx.x;
  const int size = channels * (taps + 1);
  float sum = 0;
  if (i < size) {
    for (int s = threadIdx.y; s < splits; s += kSumRows) {
      sum += partial[static_cast<int64_t>(s) * size + i];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= size) {
    return;
  }
  for (int row = 1; row < kSumRows; ++row) {
    sum += sums[row][threadIdx.x];
  }
  const int c = i / (taps + 1);
  const int tap = i % (taps + 1);
  if (tap < taps) {
    grad_weight[c * taps + tap] = static_cast<T>(sum);
  } else if (grad_bias) {
    grad_bias[c] = static_cast<T>(sum);
  }
}

// Block (c, split) goes through its images of channel c, `planes` at a time, and each thread
// through the same kRows × kCols outputs of them all.
template <typename Axis, typename T>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_weight_kernel(PlaneLaunch launch, int planes_per_step, int grad_vector,
                        const T* __restrict__ x, const T* __restrict__ grad,
                        float* __restrict__ partial) {
  using Stencil = PlaneStencil<Axis>;
  constexpr int kRows = Stencil::kRows, kCols = Stencil::kCols, kTaps = Stencil::kTaps;
  extern __shared__ __align__(16) unsigned char memory[];
  T* windows = reinterpret_cast<T*>(memory);
  T* grads = windows + planes_per_step * launch.window_h * launch.window_w;

  const int c = blockIdx.x;
  const int64_t in_size = static_cast<int64_t>(launch.in_h) * launch.in_w;
  const int64_t out_size = static_cast<int64_t>(launch.out_h) * launch.out_w;
  const int across = launch.tile_w / kCols;
  const int down = launch.tile_h / kRows;
  const int p = threadIdx.x / (across * down);
  const int row = threadIdx.x / across % down * kRows;
  const int col = threadIdx.x % across * kCols;
  const int threads = across * down;
  const int thread = threadIdx.x % threads;
  T* window = windows + p * launch.window_h * launch.window_w;
  T* tile_grad = grads + p * launch.tile_h * launch.tile_w;
  const int window_offset = Axis::step(row) * launch.window_w + Axis::step(col);
  const int grad_offset = row * launch.tile_w + col;

  float sum[kTaps + 1] = {};
  for (int first = blockIdx.y * planes_per_step; first < launch.planes;
       first += gridDim.y * planes_per_step) {
    const int planes = min(planes_per_step, launch.planes - first);
    for (int tile = 0; tile < launch.tiles_h * launch.tiles_w; ++tile) {
      const int tile_h = tile / launch.tiles_w * launch.tile_h;
      const int tile_w = tile % launch.tiles_w * launch.tile_w;
      __syncthreads();
      if (p < planes) {
        const int64_t plane = static_cast<int64_t>(first + p) * launch.channels + c;
        stage(launch.load_vector, window, x + plane * in_size, launch.in_h, launch.in_w,
              launch.first_h + Axis::step(tile_h), launch.first_w + Axis::step(tile_w),
              launch.window_h, launch.window_w, launch.row_threads_log2, thread, threads);
        stage(grad_vector, tile_grad, grad + plane * out_size, launch.out_h, launch.out_w, tile_h,
              tile_w, launch.tile_h, launch.tile_w, launch.row_threads_log2, thread, threads);
      }
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncthreads();
      if (p >= planes) {
        continue;
      }
      float g[kRows][kCols];
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        load_row<1>(tile_grad + grad_offset + q * launch.tile_w, g[q]);
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          sum[kTaps] += g[q][j];
        }
      }
#pragma unroll
      for (int r = 0; r < Stencil::kInRows; ++r) {
        float in[Stencil::kVectors * 4];
        load_row<Stencil::kVectors>(window + window_offset + r * launch.window_w, in);
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
  float* by_warp = reinterpret_cast<float*>(memory);
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

// The channels and columns that a thread of strip_weight_kernel has registers for.
template <typename Axis>
struct WeightMarch : March<Axis> {
  using Base = March<Axis>;
  static_assert(Base::kStepOut == 1, "weights have no transposed march");
  static constexpr int kChannels = Base::kTaps == 3 ? 4 : (Base::kTaps == 5 ? 2 : 1);
  static constexpr int kInCols = Axis::inputs(Base::kCols);
};

// A block goes through one segment of blockDim.z images; the last kPending rows of grad_output wait
// in registers for the inputs that they meet.
template <typename Axis, typename T>
__global__ void __launch_bounds__(kStripThreads)
    strip_weight_kernel(StripLaunch launch, const T* __restrict__ x, const T* __restrict__ grad,
                        float* __restrict__ partial) {
  using M = WeightMarch<Axis>;
  constexpr int V = M::kChannels, kCols = M::kCols, kTaps = M::kTaps, kPending = M::kPending;
  extern __shared__ __align__(16) unsigned char memory[];
  const int pitch = blockDim.x * V;
  const int row_size = launch.window_w * pitch;
  const int step_size = M::kStepIn * row_size + blockDim.y * kCols * pitch;
  // Per image and step: kStepIn rows of x, then one of grad.
  T* ring = reinterpret_cast<T*>(memory) + threadIdx.z * (launch.ahead + 1) * step_size;
  const int offset = Axis::step(threadIdx.y * kCols) * pitch + threadIdx.x * V;
  const int grad_offset = M::kStepIn * row_size + threadIdx.y * kCols * pitch + threadIdx.x * V;

  const StripPlace at(launch, V);
  const int64_t in_row = static_cast<int64_t>(launch.in_w) * launch.channels;
  const int64_t out_row = static_cast<int64_t>(launch.out_w) * launch.channels;
  const int w0 = at.tile * blockDim.y * kCols;
  const int first_w = launch.start_w + Axis::step(w0);
  const int h0 = at.segment * launch.steps;
  const int end = min(h0 + launch.steps, launch.out_h);
  const int first_h = launch.start_h + Axis::step(h0) + M::kWindow - M::kStepIn;
  const T* image = x + at.n * launch.in_h * in_row + at.first_channel;
  const T* grads = grad + at.n * launch.out_h * out_row + at.first_channel;
  const int count = at.n < launch.images ? at.count : 0;
  const RowCopier<T> copier(launch, first_w, launch.window_w, launch.in_w, pitch, count);
  const RowCopier<T> grad_copier(launch, w0, blockDim.y * kCols, launch.out_w, pitch, count);
  const auto stage = [&](int step) {
    T* slot = ring + (step + M::kWarmUp) % (launch.ahead + 1) * step_size;
    if (h0 + step < end) {
#pragma unroll
      for (int r = 0; r < M::kStepIn; ++r) {
        const int y = first_h + step * M::kStepIn + r;
        if (y >= 0 && y < launch.in_h) {
          copier.copy(slot + r * row_size, image + y * in_row);
        }
      }
      const int newest = h0 + step + kPending - 1;
      if (newest < end) {
        grad_copier.copy(slot + M::kStepIn * row_size, grads + newest * out_row);
      }
    }
    __pipeline_commit();
  };
  for (int step = -M::kWarmUp; step < launch.ahead - M::kWarmUp; ++step) {
    stage(step);
  }
  float sum[kTaps * kTaps + 1][V] = {};
  float g[kPending][kCols][V] = {};
  for (int step = -M::kWarmUp; h0 + step < end; ++step) {
    wait_for_step(launch.ahead);
    stage(step + launch.ahead);
    const T* slot = ring + (step + M::kWarmUp) % (launch.ahead + 1) * step_size;
    // grad_output's rows move up as the inputs pass them.
#pragma unroll
    for (int m = 0; m + 1 < kPending; ++m) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          g[m][j][v] = g[m + 1][j][v];
        }
      }
    }
    if (h0 + step + kPending - 1 < end) {
      load_pixels<V>(slot + grad_offset, pitch, g[kPending - 1]);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum[kTaps * kTaps][v] += g[kPending - 1][j][v];
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          g[kPending - 1][j][v] = 0;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < M::kStepIn; ++r) {
      const int y = first_h + step * M::kStepIn + r;
      if (y < 0 || y >= launch.in_h) {
        continue;
      }
      float in[M::kInCols][V];
      load_pixels<V>(slot + r * row_size + offset, pitch, in);
#pragma unroll
      for (int m = 0; m < kPending; ++m) {
        const int a = M::tap(m, r);
#pragma unroll
        for (int i = 0; i < M::kInCols; ++i) {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            const int b = Axis::tap(j, i);
            if (a >= 0 && b >= 0) {
#pragma unroll
              for (int v = 0; v < V; ++v) {
                sum[a * kTaps + b][v] += g[m][j][v] * in[i][v];
              }
            }
          }
        }
      }
    }
  }

  // Over the groups, one after the other.
  float* total = reinterpret_cast<float*>(memory);  // [kTaps · kTaps + 1][pitch]
  for (int group = 0; group < blockDim.y * blockDim.z; ++group) {
    __syncthreads();
    if (threadIdx.z * blockDim.y + threadIdx.y == group && at.n < launch.images) {
#pragma unroll
      for (int i = 0; i <= kTaps * kTaps; ++i) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          float* to = total + i * pitch + threadIdx.x * V + v;
          *to = group == 0 ? sum[i][v] : *to + sum[i][v];
        }
      }
    }
  }
  __syncthreads();
  constexpr int kSums = kTaps * kTaps + 1;
  float* to =
      partial + (static_cast<int64_t>(blockIdx.x) * launch.channels + at.first_channel) * kSums;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  for (int i = thread; i < at.count * kSums; i += blockDim.x * blockDim.y * blockDim.z) {
    to[i] = total[i % kSums * pitch + i / kSums];
  }
}

}  // namespace ops::cuda
