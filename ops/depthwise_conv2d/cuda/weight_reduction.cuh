// Weight and bias gradients as a two-stage reduction over all images (core/cuda/reduce.cuh). A
// single split writes the gradients in stage 1. Padding is multiplied as zeros: if an input or
// gradient is non-finite, any tap of its channel may be NaN.
#pragma once

#include "core/cuda/reduce.cuh"
#include "depthwise_conv2d/cuda/families.cuh"

namespace ops::depthwise_conv2d {

// Destination of stage 1: per split and channel one sum per tap, then the bias.
template <typename T>
struct WeightReduction {
  int channels, taps;
  T* grad_weight;
  T* grad_bias;          // nullptr: not requested
  acc_t<T>* split_sums;  // nullptr: a single split, which writes the gradients

  __host__ __device__ int sums() const { return channels * (taps + 1); }  // per split

  // Write sum i, counted from tap 0 of `channel`, to its gradient if that is requested.
  __device__ void write(int channel, int i, acc_t<T> sum) const {
    channel += i / (taps + 1);
    const int tap = i % (taps + 1);
    T* to = tap < taps  ? grad_weight + channel * taps + tap
            : grad_bias ? grad_bias + channel
                        : nullptr;
    if (to) {
      *to = static_cast<T>(sum);
    }
  }
  // Write the same sum of a split.
  __device__ void put(int split, int channel, int i, acc_t<T> sum) const {
    if (split_sums) {
      split_sums[static_cast<int64_t>(split) * sums() + channel * (taps + 1) + i] = sum;
    } else {
      write(channel, i, sum);
    }
  }
  __device__ void operator()(int i, acc_t<T> sum) const { write(0, i, sum); }  // stage 2
};

// Run stage 1, stage1(reduction), which writes `splits` splits, then stage 2.
template <typename T, typename F>
void reduce_weights(const WeightGradient<T>& c, int64_t splits, const F& stage1) {
  if (c.dry_run) {
    return;
  }
  const Geometry& g = c.g;
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
  second_stage(reduction.split_sums, splits, reduction.sums(), reduction, c.stream);
}

}  // namespace ops::depthwise_conv2d
