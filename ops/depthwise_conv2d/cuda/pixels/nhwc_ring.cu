// nhwc_ring: NHWC, a ring buffer of input rows, pending output rows in registers.
//
//      ring buffer in shared memory        pending outputs (registers)
//      ┌──────────────┐                    ┌──────────┐ row r     complete: stored
//      │ row y        │ ── each tap row ─► │ partly   │ row r + 1
//      │ row y+1 …    │ (copies in flight) │ summed   │ row r + 2 …
//      └──────────────┘                    └──────────┘
//
//   block:   a range of the sequence of all images' output rows, at adjacent columns and channels
//   shared:  kDepth + 1 stages of input rows and a zero row; from 5×5 on also the filters
//   thread:  4 to 8 columns of 2 channels (1 if C is odd or a tensor is misaligned); adds each
//            input row to the pending output rows that use it
#include "depthwise_conv2d/cuda/pixels/nhwc_ring_kernel.cuh"

namespace ops::cuda {
namespace {

// Columns per thread and threads per block that fill the registers without spills. V: channels.
template <typename Axis>
constexpr int kConvolutionCols = !Axis::kTransposed ? 7 : (Axis::kTaps == 3 ? 8 : 4);
template <typename Axis>  // 5×5 with stride 1, 7×7
constexpr bool kManySums = Axis::kTaps == 7 || (Axis::kTaps == 5 && Axis::kStride == 1);
template <typename Axis, typename T, int V>
using ConvolutionShape =
    RingShape<Axis, V, kConvolutionCols<Axis>, kRingDepth<Axis, T>, kManySums<Axis> ? 192 : 256>;

}  // namespace

template <typename T>
bool nhwc_ring(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    if (c.g.c < kMinChannels) {
      return false;
    }
    if constexpr (Axis::kDilation == 1) {  // direct_l1 runs dilation 2
      const auto launch = [&](auto shape) {
        return launch_ring<RingPass::kConvolution, decltype(shape)>(c);
      };
      // Odd C, a misaligned tensor, or too few threads for the copies: one channel per thread. With
      // stride 2, direct_l1 is faster. 7×7: always one, for which 4 blocks fit an SM.
      if constexpr (std::is_same_v<Axis, ForwardAxis<7, 1, 1>>) {
        return launch(RingShape<Axis, 1, 7, kRingDepth<Axis, T>, 128, 4>{});
      } else if constexpr (Axis::kStride == 1) {
        return launch(ConvolutionShape<Axis, T, 2>{}) || launch(ConvolutionShape<Axis, T, 1>{});
      } else {
        return launch(ConvolutionShape<Axis, T, 2>{});
      }
    }
    return false;
  });
}

template bool nhwc_ring(const Convolution<float>&);
template bool nhwc_ring(const Convolution<Half>&);
template bool nhwc_ring(const Convolution<BFloat16>&);

}  // namespace ops::cuda
