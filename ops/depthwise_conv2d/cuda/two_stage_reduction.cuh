// Deterministic two-stage reduction of weight and bias gradients (sums over all images).
//
//   stage 1   blocks (split, channels, taps) ── shared memory ──► split_sums [splits, C, taps + 1]
//   stage 2   reduce_splits_kernel: adds the splits in a fixed order ──► grad_weight, grad_bias
//
// A single split writes the gradients in stage 1. No atomics: results are bitwise reproducible.
// Padding is multiplied as zeros: if an input or gradient is non-finite, any tap of its channel may
// be NaN.
#pragma once

#include <algorithm>

#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::cuda {

// Destination of stage 1: per split and channel one sum per tap, then the bias.
template <typename T>
struct WeightReduction {
  int channels, taps;
  T* grad_weight;
  T* grad_bias;          // nullptr: not requested
  acc_t<T>* split_sums;  // nullptr: a single split, which writes the gradients

  __device__ int sums() const { return channels * (taps + 1); }  // per split

  // Return the destination of sum i, counted from the channel's tap 0; nullptr: not requested.
  __device__ T* gradient(int channel, int i) const {
    channel += i / (taps + 1);
    const int tap = i % (taps + 1);
    return tap < taps  ? grad_weight + channel * taps + tap
           : grad_bias ? grad_bias + channel
                       : nullptr;
  }
};

// Writer of a block's sums, for the channels from `channel` on.
template <typename T>
class BlockSums {
 public:
  __device__ BlockSums(const WeightReduction<T>& reduction, int split, int channel)
      : reduction_(reduction),
        channel_(channel),
        first_(static_cast<int64_t>(split) * reduction.sums() + channel * (reduction.taps + 1)) {}

  // Write sum i: tap i % (taps + 1) of the block's channel i / (taps + 1).
  __device__ void put(int i, acc_t<T> sum) {
    if (reduction_.split_sums) {
      reduction_.split_sums[first_ + i] = sum;
    } else if (T* to = reduction_.gradient(channel_, i)) {
      *to = static_cast<T>(sum);
    }
  }

 private:
  const WeightReduction<T>& reduction_;
  const int channel_;
  const int64_t first_;
};

constexpr int kReduceColumns = 32;

// Stage 2. kRows threads reduce one sum; each adds every kRows-th split.
template <int kRows, typename T>
__global__ void __launch_bounds__(kReduceColumns* kRows)
    reduce_splits_kernel(int splits, WeightReduction<T> reduction) {
  __shared__ acc_t<T> sums[kRows][kReduceColumns];
  const int column = threadIdx.x, row = threadIdx.y;
  const int size = reduction.sums();
  const int i = blockIdx.x * kReduceColumns + column;
  wait_for_previous_kernel();
  acc_t<T> sum = 0;
  for (int s = row; s < splits && i < size; s += kRows) {
    sum += reduction.split_sums[static_cast<int64_t>(s) * size + i];
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0 && i < size) {
    for (int r = 1; r < kRows; ++r) {
      sum += sums[r][column];
    }
    if (T* to = reduction.gradient(0, i)) {
      *to = static_cast<T>(sum);
    }
  }
}

// Return the shared memory of reduce_block in elements, with `sums` sums per thread.
inline size_t reduction_elements(int lanes, int groups, int sums) {
  return static_cast<size_t>(lanes) * std::max(1, groups / 2) * sums;
}

// Tree reduction over `groups` groups of `lanes` threads; each thread has kSums sums of each of V
// channels. Afterwards shared[i] is sum i % kSums of the block's channel i / kSums. Call it from
// all threads.
template <int kSums, int V, typename Acc>
__device__ void reduce_block(Acc (&sum)[kSums][V], Acc* shared, int lane, int lanes, int group,
                             int groups) {
  trigger_dependent_launch();
  while (groups > 1) {
    const int lower = (groups + 1) / 2, upper = groups - lower;
    const int pitch = upper * lanes;
    Acc* mine = shared + (group < lower ? group : group - lower) * lanes + lane;
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
}

// reduce_block, then write the sums of `channels` channels.
template <int kSums, int V, typename T>
__device__ void reduce_and_put(float (&sum)[kSums][V], float* shared, int lane, int lanes,
                               int group, int groups, int channels, BlockSums<T> to) {
  reduce_block(sum, shared, lane, lanes, group, groups);
  for (int i = flat_thread(); i < channels * kSums; i += blockDim.x * blockDim.y * blockDim.z) {
    to.put(i, shared[i]);
  }
}

template <int kRows, typename T>
void launch_reduce_splits(const WeightReduction<T>& reduction, int64_t splits, int64_t sums,
                          cudaStream_t stream) {
  launch_dependent(reduce_splits_kernel<kRows, T>, dim3(ceil_div(sums, kReduceColumns)),
                   dim3(kReduceColumns, kRows), stream, static_cast<int>(splits), reduction);
}

// Run stage 1, stage1(reduction), which writes `splits` splits, then stage 2.
template <typename T, typename F>
void two_stage_reduction(const WeightGradient<T>& c, int64_t splits, const F& stage1) {
  if (c.dry_run) {
    return;
  }
  const DepthwiseGeometry& g = c.g;
  const int64_t taps = c.grad_weight ? g.kernel_h * g.kernel_w : 0;  // 0: bias gradient only
  WeightReduction<T> reduction{static_cast<int>(g.c), static_cast<int>(taps), c.grad_weight,
                               c.grad_bias, nullptr};
  if (splits == 1) {
    stage1(reduction);
    return;
  }
  const ScalarType dtype = accumulator_dtype(c.like.scalar_type());
  Tensor split_sums = empty(c.like, {splits, g.c, taps + 1}, dtype);
  reduction.split_sums = split_sums.mutable_data_ptr<acc_t<T>>();
  stage1(reduction);
  constexpr int64_t kFewSums = 2048;
  const int64_t sums = g.c * (taps + 1);
  if (splits <= 4) {
    launch_reduce_splits<4>(reduction, splits, sums, c.stream);
  } else if (splits <= 64 || sums > kFewSums) {
    launch_reduce_splits<16>(reduction, splits, sums, c.stream);
  } else {
    launch_reduce_splits<32>(reduction, splits, sums, c.stream);
  }
}

}  // namespace ops::cuda
