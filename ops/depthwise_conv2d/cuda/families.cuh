// Launch functions of the kernel families, for dispatch.cu. Each returns false if its family has no
// kernel for the problem, or a slow one.
#pragma once

#include "core/cuda/common.cuh"
#include "depthwise_conv2d/op.h"

namespace ops::depthwise_conv2d {

using namespace ops::cuda;

template <typename T>
struct Image {
  T* data;
  int64_t h, w;
};

// Forward pass or input gradient. The input gradient is the convolution with the flipped filter
// (`flip`) if the stride is 1, else a transposed convolution (`transposed`).
template <typename T>
struct Convolution {
  const Geometry& g;
  Image<const T> in;
  Image<T> out;
  const T* weight;
  const T* bias;
  cudaStream_t stream;
  bool dry_run = false;  // select a family without a launch
  bool transposed = false, flip = false;
  int64_t padding_h = g.padding_h, padding_w = g.padding_w;

  template <typename Kernel, typename... Args>
  void launch(Kernel kernel, dim3 grid, dim3 block, size_t shared, const Args&... args) const {
    if (!dry_run) {
      launch_kernel(kernel, grid, block, shared, stream, args...);
    }
  }
};

template <typename T>
struct WeightGradient {
  const Geometry& g;
  const Tensor& like;  // device of the split sums
  const T* x;
  const T* grad;
  T* grad_weight;  // nullptr: not requested
  T* grad_bias;    // nullptr: not requested
  cudaStream_t stream;
  bool dry_run = false;
};

// NCHW: stages loaded by bulk copies, FMAs in float32.
template <typename T>
bool nchw_fma(const Convolution<T>& c);
template <typename T>
bool nchw_fma_weight_gradient(const WeightGradient<T>& c);

// NCHW, 16 bits: the same stages, implicit GEMM on matrix units.
template <typename T>
bool nchw_mma(const Convolution<T>& c);
template <typename T>
bool nchw_mma_weight_gradient(const WeightGradient<T>& c);

// NHWC, 16 bits: implicit GEMM on sparse matrix units.
template <typename T>
bool nhwc_mma(const Convolution<T>& c);

// NHWC: a ring buffer of input rows, pending output rows in registers.
template <typename T>
bool nhwc_ring(const Convolution<T>& c);
template <typename T>
bool nhwc_ring_weight_gradient(const WeightGradient<T>& c);
// All gradients in one pass.
template <typename T>
bool nhwc_ring_all_gradients(const Convolution<T>& input_gradient,
                             const WeightGradient<T>& weight_gradient);

// NCHW or NHWC: register tiles, inputs from the L1 cache.
template <typename T>
bool direct_l1(const Convolution<T>& c);
template <typename T>
bool direct_l1_weight_gradient(const WeightGradient<T>& c);

// The same with run-time kernel, stride and dilation; also float64.
template <typename T>
void direct_l1_runtime(const Convolution<T>& c);
template <typename T>
void direct_l1_runtime_weight_gradient(const WeightGradient<T>& c);

// NCHW or NHWC, stride 1, dilation 1: input and filter in shared memory.
template <typename T>
bool large_filter(const Convolution<T>& c);
template <typename T>
bool large_filter_weight_gradient(const WeightGradient<T>& c);

// Return the input and output elements per SM: the "load" in the dispatch thresholds.
inline int64_t elements_per_sm(const Geometry& g) {
  const int64_t elements = g.n * g.c * (g.h * g.w + g.out_h * g.out_w);
  return elements / Device::attribute(cudaDevAttrMultiProcessorCount);
}

}  // namespace ops::depthwise_conv2d
