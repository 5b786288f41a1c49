// The end of weight and bias gradients, which are sums over all images. Blocks leave partial sums,
// added up here in a fixed order, or, where a block has all there is to a sum, put it into the
// gradient. No atomics, the same bits every run.
#pragma once

#include <algorithm>

#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/naive.cuh"

namespace ops::cuda {

// Where the sums of blocks go: into the gradients or, where `partial` is given, there, for each
// split [channels, taps + 1], of which the last is the bias. Sums that are not a number are summed
// again, exactly: the tiled kernels multiply what lies beyond an edge with zero, which is not zero
// where the other side is infinite.
template <typename T>
struct WeightTotals {
  DepthwiseGeometry g;
  const T* x;
  const T* grad;
  T* grad_weight;
  T* grad_bias;
  float* partial;  // nullptr: straight into the gradients

  __device__ T* gradient(int c, int tap, int sums) const {
    return tap < sums - 1 ? grad_weight + c * (sums - 1) + tap
           : grad_bias    ? grad_bias + c
                          : nullptr;
  }
};

// Takes what a block sums up for its channels from `channel` on, so many sums each.
template <typename T>
class BlockTotals {
 public:
  __device__ BlockTotals(const WeightTotals<T>& totals, int split, int channel, int sums)
      : totals_(totals), channel_(channel), sums_(sums) {
    if (totals.partial) {
      partial_ = totals.partial + (split * totals.g.c + channel) * sums;
    }
  }

  // The i-th of all their sums.
  __device__ void put(int i, float sum) {
    if (partial_) {
      partial_[i] = sum;
    } else if (T* to = gradient(i)) {
      *to = static_cast<T>(sum);
      again_ |= isnan(sum);
    }
  }
  // When all of `count` sums have been put: called by all threads.
  __device__ void finish(int count) {
    if (partial_ || !__syncthreads_or(again_)) {
      return;
    }
    for (int i = flat_thread(); i < count; i += blockDim.x * blockDim.y * blockDim.z) {
      T* to = gradient(i);
      if (to && isnan(static_cast<float>(*to))) {
        *to = static_cast<T>(
            tap_sum(totals_.g, totals_.grad, totals_.x, channel_ + i / sums_, i % sums_, 0, 1));
      }
    }
  }

 private:
  const WeightTotals<T>& totals_;
  const int channel_, sums_;
  float* partial_ = nullptr;
  bool again_ = false;

  __device__ T* gradient(int i) const {
    return totals_.gradient(channel_ + i / sums_, i % sums_, sums_);
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
  const DepthwiseGeometry& g = totals.g;
  const int sums_of_channel = g.kernel_h * g.kernel_w + 1;
  const int size = g.c * sums_of_channel;
  const int i = blockIdx.x * kSumColumns + column;
  const int c = i / sums_of_channel, tap = i % sums_of_channel;
  T* to = totals.gradient(c, tap, sums_of_channel);
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
    sums[row][column] = tap_sum(g, totals.grad, totals.x, c, tap, row, kRows);
  }
  __syncthreads();
  if (row == 0 && i < size && to) {
    *to = static_cast<T>(total());
  }
}

// Floats of shared memory that put_sums takes, where each thread has so many sums.
inline size_t partial_floats(int lanes, int groups, int sums) {
  return static_cast<size_t>(lanes) * std::max(1, groups / 2) * sums;
}

// Puts what a block's threads have summed up: `groups` of `lanes` threads, each with the kSums sums
// of each of V channels, of which there are `count`.
template <int kSums, int V, typename T>
__device__ void put_sums(float (&sum)[kSums][V], float* shared, int lane, int lanes, int group,
                         int groups, int count, BlockTotals<T>& totals) {
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
    totals.put(i, shared[i]);
  }
  totals.finish(count * kSums);
}

template <int kRows, typename T>
void add_partials_in_rows(const WeightTotals<T>& totals, int64_t splits, int64_t sums,
                          cudaStream_t stream) {
  launch_early(sum_partials_kernel<kRows, T>, dim3(ceil_div(sums, kSumColumns)),
               dim3(kSumColumns, kRows), stream, totals.partial, static_cast<int>(splits), totals);
}

// launch(totals) a kernel whose blocks put so many splits there, and add them up. whole: a block
// has all sums of its channels.
template <typename T, typename F>
void sum_splits(const WeightGradient<T>& c, int64_t splits, bool whole, const F& launch) {
  const DepthwiseGeometry& g = c.g;
  WeightTotals<T> totals{g, c.x, c.grad, c.grad_weight, c.grad_bias, nullptr};
  constexpr int64_t kFewToSumAgain = 4096;  // by one thread
  if (splits == 1 && whole && g.n * g.out_h * g.out_w <= kFewToSumAgain) {
    launch(totals);
    return;
  }
  const int64_t sums_of_channel = g.kernel_h * g.kernel_w + 1;
  Tensor partial = empty(c.like, {splits, g.c, sums_of_channel}, ScalarType::Float);
  totals.partial = partial.mutable_data_ptr<float>();
  launch(totals);
  constexpr int64_t kFewSums = 2048;
  const int64_t sums = g.c * sums_of_channel;
  if (splits <= 4) {
    add_partials_in_rows<4>(totals, splits, sums, c.stream);
  } else if (splits <= 64 || sums > kFewSums) {
    add_partials_in_rows<16>(totals, splits, sums, c.stream);
  } else {
    add_partials_in_rows<32>(totals, splits, sums, c.stream);
  }
}

}  // namespace ops::cuda
