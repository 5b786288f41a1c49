// The end of weight and bias gradients, which are sums over all images: blocks leave partial sums
// of their images, added up here in a fixed order. No atomics, the same bits every run.
#pragma once

#include <algorithm>

#include "depthwise_general.cuh"
#include "depthwise_paths.cuh"

namespace ops::cuda {

// Where the sums of blocks go: [channels, taps + 1], of which the last is the bias, for each split
// or, where there is but one, into the gradients. Sums that are not a number are summed again,
// exactly: the tiled kernels multiply what lies beyond an edge with zero, which is not zero where
// the other side is infinite.
template <typename T>
struct WeightTotals {
  DepthwiseGeometry g;
  const T* x;
  const T* grad;
  T* grad_weight;
  T* grad_bias;
  float* partial;  // nullptr where there is one split

  __device__ int size_of_channel() const { return static_cast<int>(g.kernel_h * g.kernel_w) + 1; }

  // The i-th sum of a split.
  __device__ void put(int split, int i, float sum) const {
    if (partial) {
      partial[split * (g.c * size_of_channel()) + i] = sum;
    } else {
      store(i, isnan(sum) ? sum_again(i, 0, 1) : sum);
    }
  }
  __device__ float sum_again(int i, int thread, int threads) const {
    return tap_sum(g, grad, x, i / size_of_channel(), i % size_of_channel(), thread, threads);
  }
  __device__ void store(int i, float sum) const {
    const int c = i / size_of_channel(), tap = i % size_of_channel();
    if (tap < size_of_channel() - 1) {
      grad_weight[i - c] = static_cast<T>(sum);
    } else if (grad_bias) {
      grad_bias[c] = static_cast<T>(sum);
    }
  }
};

constexpr int kSumColumns = 32;

// A column of kRows threads adds up one sum, each of them every kRows-th split.
template <int kRows, typename T>
__global__ void __launch_bounds__(kSumColumns* kRows)
    sum_partials_kernel(const float* __restrict__ partial, int splits, WeightTotals<T> totals) {
  __shared__ float sums[kRows][kSumColumns];
  __shared__ bool again[kSumColumns];
  const int column = threadIdx.x, row = threadIdx.y;
  const int size = totals.g.c * totals.size_of_channel();
  const int i = blockIdx.x * kSumColumns + column;
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
    sums[row][column] = totals.sum_again(i, row, kRows);
  }
  __syncthreads();
  if (row == 0 && i < size) {
    totals.store(i, total());
  }
}

// Floats of shared memory that put_sums takes, where each thread has so many sums.
inline size_t partial_floats(int lanes, int groups, int sums) {
  return static_cast<size_t>(lanes) * std::max(1, groups / 2) * sums;
}

// put(i, sum) what a block's threads have summed up: `groups` of `lanes` threads, each with the
// kSums sums of each of V channels, of which there are `count`.
template <int kSums, int V, typename Put>
__device__ void put_sums(float (&sum)[kSums][V], float* shared, int lane, int lanes, int group,
                         int groups, int count, const Put& put) {
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
    put(i, shared[i]);
  }
}

template <int kRows, typename T>
void add_partials_in_rows(const WeightTotals<T>& totals, int64_t splits, int64_t sums,
                          cudaStream_t stream) {
  launch_early(sum_partials_kernel<kRows, T>, dim3(ceil_div(sums, kSumColumns)),
               dim3(kSumColumns, kRows), stream, totals.partial, static_cast<int>(splits), totals);
}

// launch(totals) a kernel whose blocks put so many splits there, and add them up.
template <typename T, typename F>
void sum_splits(const WeightGradient<T>& c, int64_t splits, const F& launch) {
  const DepthwiseGeometry& g = c.g;
  WeightTotals<T> totals{g, c.x, c.grad, c.grad_weight, c.grad_bias, nullptr};
  constexpr int64_t kFewToSumAgain = 4096;  // by one thread
  if (splits == 1 && g.n * g.out_h * g.out_w <= kFewToSumAgain) {
    launch(totals);
    return;
  }
  const int64_t size_of_channel = g.kernel_h * g.kernel_w + 1;
  Tensor partial = empty(c.like, {splits, g.c, size_of_channel}, ScalarType::Float);
  totals.partial = partial.mutable_data_ptr<float>();
  launch(totals);
  constexpr int64_t kFewSums = 2048;
  const int64_t sums = g.c * size_of_channel;
  if (splits <= 4) {
    add_partials_in_rows<4>(totals, splits, sums, c.stream);
  } else if (splits <= 64 || sums > kFewSums) {
    add_partials_in_rows<16>(totals, splits, sums, c.stream);
  } else {
    add_partials_in_rows<32>(totals, splits, sums, c.stream);
  }
}

}  // namespace ops::cuda
