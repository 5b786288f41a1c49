#include "depthwise_conv2d/cuda/nchw_fma.cuh"
#include "depthwise_conv2d/cuda/nchw_kernels.cuh"

namespace ops::cuda {

template <typename T>
bool convolve_planes(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed,
                       [&](auto axis) { return launch_planes<ThreadTile<decltype(axis), T>>(c); });
}

template <typename T>
bool sum_weights_planes(const WeightGradient<T>& c) {
  return dispatch_direct(
      c.g, [&](auto axis) { return launch_plane_weights<ThreadSums<decltype(axis), T>>(c); });
}

template bool convolve_planes(const Convolution<float>&);
template bool convolve_planes(const Convolution<Half>&);
template bool convolve_planes(const Convolution<BFloat16>&);
template bool sum_weights_planes(const WeightGradient<float>&);
template bool sum_weights_planes(const WeightGradient<Half>&);
template bool sum_weights_planes(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
