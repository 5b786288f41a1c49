// The kernel families of depthwise convolution, as dispatch.cu calls them. Each function returns
// false where its family has no kernel for the problem.
#pragma once

#include "depthwise_conv2d/cuda/tap_maps.cuh"
#include "depthwise_conv2d/op.h"

namespace ops::cuda {

// An image on one side of the convolution.
template <typename T>
struct Image {
  T* data;
  int64_t h, w;
};

// out = the convolution of `in` with the filters of g, or the gradient of its input: that is with
// stride 1 the convolution with flipped filters, with others a transposed one.
template <typename T>
struct Convolution {
  const DepthwiseGeometry& g;
  bool transposed;
  Image<const T> in;
  Image<T> out;
  int64_t padding_h, padding_w;
  bool flip;
  const T* weight;
  const T* bias;
  cudaStream_t stream;
  bool dry_run = false;  // choose a family, launch nothing

  template <typename Kernel, typename... Args>
  void launch(Kernel kernel, dim3 grid, dim3 block, size_t shared, const Args&... args) const {
    if (!dry_run) {
      launch_kernel(kernel, grid, block, shared, stream, args...);
    }
  }
};

template <typename T>
struct WeightGradient {
  const DepthwiseGeometry& g;
  const Tensor& like;  // device of the sums of splits
  const T* x;
  const T* grad;
  T* grad_weight;  // nullptr: not wanted
  T* grad_bias;    // nullptr: not wanted
  cudaStream_t stream;
  bool dry_run = false;
};

// NCHW: tiles staged by bulk copies, fused multiply-adds in float32.
template <typename T>
bool nchw_fma(const Convolution<T>& c);
template <typename T>
bool nchw_fma_weight_gradient(const WeightGradient<T>& c);

// NCHW, 16 bits: the same stages, matrix units.
template <typename T>
bool nchw_mma(const Convolution<T>& c);
template <typename T>
bool nchw_mma_weight_gradient(const WeightGradient<T>& c);
inline bool nchw_mma(const Convolution<float>&) {
  return false;
}
inline bool nchw_mma_weight_gradient(const WeightGradient<float>&) {
  return false;
}

// NHWC, 16 bits: tiles transposed in shared memory, matrix units.
template <typename T>
bool nhwc_mma(const Convolution<T>& c);
template <typename T>
bool nhwc_mma_weight_gradient(const WeightGradient<T>& c);
inline bool nhwc_mma(const Convolution<float>&) {
  return false;
}
inline bool nhwc_mma_weight_gradient(const WeightGradient<float>&) {
  return false;
}

// NHWC: rows stream through registers.
template <typename T>
bool nhwc_stream(const Convolution<T>& c);
template <typename T>
bool nhwc_stream_weight_gradient(const WeightGradient<T>& c);

// Either format: straight from the L1 cache, register tiles.
template <typename T>
bool direct_l1(const Convolution<T>& c);
template <typename T>
bool direct_l1_weight_gradient(const WeightGradient<T>& c);

// The same for any kernel, stride and dilation, and for float64.
template <typename T>
bool direct_l1_runtime(const Convolution<T>& c);
template <typename T>
bool direct_l1_runtime_weight_gradient(const WeightGradient<T>& c);

// Either format, stride 1: input and filter in shared memory.
template <typename T>
bool large_filter(const Convolution<T>& c);
template <typename T>
bool large_filter_weight_gradient(const WeightGradient<T>& c);

// f(Direct<K, S, D>{}) for the geometries that are compile-time constants; false for the others.
template <typename F>
bool dispatch_direct(const DepthwiseGeometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != g.stride_w || g.dilation_h != g.dilation_w) {
    return false;
  }
  const auto is = [&](int64_t kernel, int64_t stride, int64_t dilation) {
    return g.kernel_h == kernel && g.stride_h == stride && g.dilation_h == dilation;
  };
  if (is(3, 1, 1)) return f(Direct<3, 1, 1>{});
  if (is(5, 1, 1)) return f(Direct<5, 1, 1>{});
  if (is(7, 1, 1)) return f(Direct<7, 1, 1>{});
  if (is(3, 1, 2)) return f(Direct<3, 1, 2>{});
  if (is(3, 2, 1)) return f(Direct<3, 2, 1>{});
  if (is(5, 2, 1)) return f(Direct<5, 2, 1>{});
  if (is(7, 2, 1)) return f(Direct<7, 2, 1>{});
  return false;
}

// f(Transposed<K, parity>{}) likewise.
template <typename F>
bool dispatch_transposed(const DepthwiseGeometry& g, const F& f) {
  if (g.kernel_h != g.kernel_w || g.stride_h != 2 || g.stride_w != 2 || g.dilation_h != 1 ||
      g.dilation_w != 1 || g.padding_h % 2 != g.padding_w % 2) {
    return false;
  }
  const bool odd = g.padding_h % 2;
  switch (g.kernel_h) {
    case 3: return odd ? f(Transposed<3, 1>{}) : f(Transposed<3, 0>{});
    case 5: return odd ? f(Transposed<5, 1>{}) : f(Transposed<5, 0>{});
    case 7: return odd ? f(Transposed<7, 1>{}) : f(Transposed<7, 0>{});
    default: return false;
  }
}

template <typename F>
bool dispatch_axis(const DepthwiseGeometry& g, bool transposed, const F& f) {
  return transposed ? dispatch_transposed(g, f) : dispatch_direct(g, f);
}

// Elements of input and output for each multiprocessor of the device: thresholds of the dispatch.
inline int64_t elements_per_sm(const DepthwiseGeometry& g) {
  const int64_t elements = g.n * g.c * (g.h * g.w + g.out_h * g.out_w);
  return elements / Device::attribute(cudaDevAttrMultiProcessorCount);
}

}  // namespace ops::cuda
