// nchw_mma: 16-bit contiguous images by matrix units, staged as in nchw_fma.cuh and multiplied as
// in mma_tile.cuh.
//
//   block:   a range of feature maps or a band of rows of one
//   shared:  the ring buffer of nchw_stage.cuh
//   thread:  a warp has 16 rows × 16, 32 or 56 columns of 1 to 4 feature maps: 4 sums a product
//
// Weight gradient: a warp keeps the diagonals of input × grad_output products, one sum a tap.
#include "depthwise_conv2d/cuda/mma_weight_gradient.cuh"
#include "depthwise_conv2d/cuda/nchw_kernels.cuh"

namespace ops::cuda {
namespace {

// Whether the lanes of a warp, which read four neighbouring words in each of eight rows that are so
// many words apart, share a bank of shared memory with at most one other.
bool is_spread(int64_t pitch) {
  int lanes[32] = {};
  for (int64_t g = 0; g < 8; ++g) {
    for (int64_t t = 0; t < 4; ++t) {
      if (++lanes[(g * pitch + t) % 32] > 2) {
        return false;
      }
    }
  }
  return true;
}

// f(axis) where matrix units are faster than multiply-adds, measured on an H200: with filters of
// 7×7, and in images 16 columns wide, where the threads of FmaTile meet in banks.
template <typename F>
bool dispatch_nchw_mma(const DepthwiseGeometry& g, int64_t in_w, int64_t out_w,
                       std::initializer_list<const void*> pointers, const F& f) {
  if (in_w % 2 != 0 || out_w % 2 != 0 || !are_aligned(pointers, 4) || !is_spread(in_w / 2)) {
    return false;
  }
  return dispatch_direct(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::inputs(8) == 7 + Axis::kTaps) {  // neither strides nor dilation
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
             if (c.out.w > 32) {
               return launch_nchw<MmaTile<Axis, 7, T>>(c);
             }
             if (c.out.w > 16) {
               return launch_nchw<MmaTile<Axis, 4, T>>(c);
             }
           }
           return launch_nchw<MmaTile<Axis, 2, T>>(c);
         });
}

template <typename T>
bool nchw_mma_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_nchw_mma(c.g, c.g.w, c.g.out_w, {c.x, c.grad}, [&](auto axis) {
    using Sums = MmaWeightTile<decltype(axis), T>;
    return c.g.padding_w % 2 == Sums::kOdd && launch_nchw_weight_gradient<Sums>(c);
  });
}

template bool nchw_mma(const Convolution<Half>&);
template bool nchw_mma(const Convolution<BFloat16>&);
template bool nchw_mma_weight_gradient(const WeightGradient<Half>&);
template bool nchw_mma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
