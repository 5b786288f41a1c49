// nchw_mma: NCHW, 16 bits, matrix units (mma.sync). Stages as in nchw_fma.cu, implicit GEMM as in
// mma_tile.cuh and mma_weight_gradient.cuh, which have the figures.
//
//   block:   a range of feature maps or a band of rows of one
//   shared:  the ring buffer of nchw_stage.cuh; outputs overwrite the inputs
//   thread:  4 accumulators per product; a warp has 16 rows × 16, 32 or 56 columns of 1 to 4 maps
//
// Weight gradient
//   block:   a range of channels (or a band of one), of every gridDim.y-th image
//   shared:  a ring buffer of two stages: inputs and grad_output; at the end the accumulators
//   thread:  4 accumulators per filter column; a warp tile has 8 whole rows of grad_output
#include "depthwise_conv2d/cuda/planes/mma_weight_gradient.cuh"
#include "depthwise_conv2d/cuda/planes/nchw_kernels.cuh"
#include "depthwise_conv2d/cuda/taps.cuh"

namespace ops::cuda {
namespace {

// Return f(axis) for 7×7, and for smaller filters on images 16 columns wide, where nchw_fma has
// bank conflicts (measured on an H200); otherwise false.
template <typename F>
bool dispatch_nchw_mma(const DepthwiseGeometry& g, int64_t in_w, int64_t out_w,
                       std::initializer_list<const void*> pointers, const F& f) {
  // Widths with more than 2-way bank conflicts if a warp reads 4 adjacent words of each of 8 rows.
  constexpr int64_t kConflicts[] = {0, 2, 22, 32, 42, 62};  // modulo 64
  if (in_w % 2 != 0 || out_w % 2 != 0 || !are_aligned(pointers, 4) ||
      std::find(std::begin(kConflicts), std::end(kConflicts), in_w % 64) != std::end(kConflicts)) {
    return false;
  }
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kStride == 1 && Axis::kDilation == 1) {
      return (Axis::kTaps == 7 || in_w == 16) && f(axis);
    }
    return false;
  });
}

}  // namespace

template <typename T>
bool nchw_mma(const Convolution<T>& c) {
  return !c.transposed &&
         dispatch_nchw_mma(c.g, c.in.w, c.out.w, {c.in.data, c.out.data}, [&](auto axis) {
           using Axis = decltype(axis);
           if constexpr (Axis::kTaps == 7) {
             if (c.out.w > 32) return launch_nchw<MmaConvolution<Axis, 7, T>>(c);
             if (c.out.w > 16) return launch_nchw<MmaConvolution<Axis, 4, T>>(c);
           }
           return launch_nchw<MmaConvolution<Axis, 2, T>>(c);
         });
}

template <typename T>
bool nchw_mma_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_nchw_mma(c.g, c.g.w, c.g.out_w, {c.x, c.grad}, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps > 3) {  // 3×3: nchw_fma is 1.2 times as fast (H200)
      using Tile = MmaWeightGradient<Axis, T>;
      return c.g.padding_w % 2 == Tile::kOdd && launch_nchw<Tile>(c);
    }
    return false;
  });
}

template bool nchw_mma(const Convolution<Half>&);
template bool nchw_mma(const Convolution<BFloat16>&);
template bool nchw_mma_weight_gradient(const WeightGradient<Half>&);
template bool nchw_mma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
