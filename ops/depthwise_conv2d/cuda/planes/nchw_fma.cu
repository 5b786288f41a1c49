// nchw_fma: dispatch; kernels in nchw_kernels.cuh, tiles and figure in nchw_fma.cuh.
#include "depthwise_conv2d/cuda/planes/nchw_fma.cuh"
#include "depthwise_conv2d/cuda/planes/nchw_kernels.cuh"

namespace ops::cuda {

template <typename T>
bool nchw_fma(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed,
                       [&](auto axis) { return launch_nchw<FmaTile<decltype(axis), T>>(c); });
}

template <typename T>
bool nchw_fma_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_forward_axis(c.g, [&](auto axis) {
    return launch_nchw_weight_gradient<FmaWeightGradientTile<decltype(axis), T>>(c);
  });
}

template bool nchw_fma(const Convolution<float>&);
template bool nchw_fma(const Convolution<Half>&);
template bool nchw_fma(const Convolution<BFloat16>&);
template bool nchw_fma_weight_gradient(const WeightGradient<float>&);
template bool nchw_fma_weight_gradient(const WeightGradient<Half>&);
template bool nchw_fma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
