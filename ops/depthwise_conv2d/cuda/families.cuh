// The tiled kernels for each memory format, as dispatch.cu calls them. All return false where
// they have no kernel for the problem.
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

// out = the convolution of `in` with the filters, or the flipped filters, of g. Transposed: the
// gradient with respect to the input of one with stride 2.
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
};

template <typename T>
struct WeightGradient {
  const DepthwiseGeometry& g;
  const Tensor& like;  // where partial sums are allocated
  const T* x;
  const T* grad;
  T* grad_weight;
  T* grad_bias;
  cudaStream_t stream;
};

// Contiguous images.
template <typename T>
bool convolve_planes(const Convolution<T>& c);
template <typename T>
bool sum_weights_planes(const WeightGradient<T>& c);

// Contiguous images of 16-bit elements, by matrix units.
template <typename T>
bool convolve_matrix(const Convolution<T>& c);
template <typename T>
bool sum_weights_matrix(const WeightGradient<T>& c);

// Channels-last images.
template <typename T>
bool convolve_strips(const Convolution<T>& c);
template <typename T>
bool sum_weights_strips(const WeightGradient<T>& c);

// Those of 16-bit elements, by matrix units.
template <typename T>
bool convolve_slabs(const Convolution<T>& c);
template <typename T>
bool sum_weights_slabs(const WeightGradient<T>& c);

// Images of either format: few, or of pixels that are not aligned.
template <typename T>
bool convolve_pixels(const Convolution<T>& c);
template <typename T>
bool sum_weights_pixels(const WeightGradient<T>& c);

// Elements of input and output that each multiprocessor of the device gets: which kernel is fastest
// depends on it. The limits are measured on an H200.
inline int64_t elements_of_multiprocessor(const DepthwiseGeometry& g) {
  const int64_t elements = g.n * g.c * (g.h * g.w + g.out_h * g.out_w);
  return elements / Device::attribute(cudaDevAttrMultiProcessorCount);
}

// f(Direct<K, S, D>{}) for the convolutions that have tiled kernels; false for the others.
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

}  // namespace ops::cuda
