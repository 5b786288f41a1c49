// The second step of weight and bias gradients, which are sums over all images: blocks leave
// partial sums of their images, added up here in a fixed order. No atomics, the same bits every
// run.
#pragma once

#include "depthwise_general.cuh"
#include "depthwise_paths.cuh"

namespace ops::cuda {

constexpr int kSumColumns = 32, kSumRows = 16;

// partial [splits, channels, taps + 1], the last of taps + 1 is the bias. A column of kSumRows
// threads adds up one sum, each of them every kSumRows-th split. Sums that are not a number are
// summed again, exactly: the tiled kernels multiply what lies beyond an edge with zero, which is
// not zero where the other side is infinite.
template <typename T>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_partials_kernel(const float* __restrict__ partial, int splits, DepthwiseGeometry g,
                        const T* __restrict__ x, const T* __restrict__ grad,
                        T* __restrict__ grad_weight, T* __restrict__ grad_bias) {
  __shared__ float sums[kSumRows][kSumColumns];
  __shared__ bool again[kSumColumns];
  const int column = threadIdx.x, row = threadIdx.y;
  const int taps = g.kernel_h * g.kernel_w;
  const int size = g.c * (taps + 1);
  const int i = blockIdx.x * kSumColumns + column;
  const int c = i / (taps + 1);
  const int tap = i % (taps + 1);
  const auto total = [&] {
    float sum = 0;
    for (int r = 0; r < kSumRows; ++r) {
      sum += sums[r][column];
    }
    return sum;
  };

  float sum = 0;
  for (int s = row; s < splits && i < size; s += kSumRows) {
    sum += partial[static_cast<int64_t>(s) * size + i];
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0) {
    again[column] = isnan(total());
  }
  __syncthreads();
  if (again[column] && i < size) {
    sums[row][column] = tap_sum(g, grad, x, c, tap, row, kSumRows);
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

// Per split a partial sum for each channel's taps and bias.
template <typename T>
Tensor empty_partials(const WeightGradient<T>& c, int64_t splits) {
  return empty(c.like, {splits, c.g.c, c.g.kernel_h * c.g.kernel_w + 1}, ScalarType::Float);
}

template <typename T>
void add_partials(const WeightGradient<T>& c, const Tensor& partial) {
  launch_kernel(sum_partials_kernel<T>,
                dim3(ceil_div(partial.size(1) * partial.size(2), kSumColumns)),
                dim3(kSumColumns, kSumRows), 0, c.stream, partial.const_data_ptr<float>(),
                static_cast<int>(partial.size(0)), c.g, c.x, c.grad, c.grad_weight, c.grad_bias);
}

}  // namespace ops::cuda
