// The second step of weight and bias gradients, which are sums over all images: blocks leave
// partial sums of their images, added up here in a fixed order. No atomics, the same bits every
// run.
#pragma once

#include <algorithm>

#include "depthwise_general.cuh"
#include "depthwise_paths.cuh"

namespace ops::cuda {

constexpr int kSumColumns = 32;

// partial [splits, channels, taps + 1], the last of taps + 1 is the bias. A column of kRows
// threads adds up one sum, each of them every kRows-th split. Sums that are not a number are
// summed again, exactly: the tiled kernels multiply what lies beyond an edge with zero, which is
// not zero where the other side is infinite.
template <int kRows, typename T>
__global__ void __launch_bounds__(kSumColumns* kRows)
    sum_partials_kernel(const float* __restrict__ partial, int splits, DepthwiseGeometry g,
                        const T* __restrict__ x, const T* __restrict__ grad,
                        T* __restrict__ grad_weight, T* __restrict__ grad_bias) {
  __shared__ float sums[kRows][kSumColumns];
  __shared__ bool again[kSumColumns];
  const int column = threadIdx.x, row = threadIdx.y;
  const int taps = g.kernel_h * g.kernel_w;
  const int size = g.c * (taps + 1);
  const int i = blockIdx.x * kSumColumns + column;
  const int c = i / (taps + 1);
  const int tap = i % (taps + 1);
  wait_for_kernel_before();
  const auto total = [&] {
    float sum = 0;
    for (int r = 0; r < kRows; ++r) {
      sum += sums[r][column];
    }
    return sum;
  };

  float sum = 0;
  for (int s = row; s < splits && i < size; s += kRows) {
    sum += partial[static_cast<int64_t>(s) * size + i];
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0) {
    again[column] = isnan(total());
  }
  __syncthreads();
  if (again[column] && i < size) {
    sums[row][column] = tap_sum(g, grad, x, c, tap, row, kRows);
  }
  __syncthreads();
  if (row > 0 || i >= size) {
    return;
  }
  if (tap < taps) {
    grad_weight[c * taps + tap] = static_cast<T>(total());
  } else if (grad_bias) {
    grad_bias[c] = static_cast<T>(total());
  }
}

// Floats of shared memory that store_partial takes, where each thread has so many sums.
inline size_t partial_floats(int lanes, int groups, int sums) {
  return static_cast<size_t>(lanes) * std::max(1, groups / 2) * sums;
}

// Stores what a block's threads have summed up: `groups` of `lanes` threads, each with the kSums
// sums of each of V channels. partial takes those of `count` channels: as many as there are.
template <int kSums, int V>
__device__ void store_partial(float (&sum)[kSums][V], float* shared, int lane, int lanes, int group,
                              int groups, int count, float* partial) {
  let_next_kernel_start();
  // The upper half of the groups is added to the lower one.
  while (groups > 1) {
    const int lower = (groups + 1) / 2, upper = groups - lower;
    const int pitch = upper * lanes;
    float* mine = shared + (group < lower ? group : group - lower) * lanes + lane;
    if (lower <= group && group < groups) {
#pragma unroll
      for (int i = 0; i < kSums * V; ++i) {
        mine[i * pitch] = sum[i / V][i % V];
      }
    }
    __syncthreads();
    if (group < upper) {
#pragma unroll
      for (int i = 0; i < kSums * V; ++i) {
        sum[i / V][i % V] += mine[i * pitch];
      }
    }
    __syncthreads();
    groups = lower;
  }
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < kSums * V; ++i) {
      shared[(lane * V + i % V) * kSums + i / V] = sum[i / V][i % V];
    }
  }
  __syncthreads();
  for (int i = flat_thread(); i < count * kSums; i += blockDim.x * blockDim.y * blockDim.z) {
    partial[i] = shared[i];
  }
}

// Per split a partial sum for each channel's taps and bias.
template <typename T>
Tensor empty_partials(const WeightGradient<T>& c, int64_t splits) {
  return empty(c.like, {splits, c.g.c, c.g.kernel_h * c.g.kernel_w + 1}, ScalarType::Float);
}

template <int kRows, typename T>
void add_partials_in_rows(const WeightGradient<T>& c, const Tensor& partial) {
  launch_early(sum_partials_kernel<kRows, T>,
               dim3(ceil_div(partial.size(1) * partial.size(2), kSumColumns)),
               dim3(kSumColumns, kRows), c.stream, partial.const_data_ptr<float>(),
               static_cast<int>(partial.size(0)), c.g, c.x, c.grad, c.grad_weight, c.grad_bias);
}

template <typename T>
void add_partials(const WeightGradient<T>& c, const Tensor& partial) {
  constexpr int64_t kFewSums = 2048;
  const int64_t splits = partial.size(0), sums = partial.size(1) * partial.size(2);
  if (splits <= 4) {
    add_partials_in_rows<4>(c, partial);
  } else if (splits <= 64 || sums > kFewSums) {
    add_partials_in_rows<16>(c, partial);
  } else {
    add_partials_in_rows<32>(c, partial);
  }
}

}  // namespace ops::cuda
