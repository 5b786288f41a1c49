// nhwc_ring, all gradients in one pass over grad_output.
//
//      ring buffer in shared memory     registers
//      ┌──────────────────┐             ┌──────────────────────────┐
//      │ grad_output row  │ ─ × taps ─► │ pending rows, grad_input │ ──► complete: stored
//      │                  │ ─ × ──────► │ a sum per tap            │ ──► stage 1, then stage 2
//      │ row of x         │ ──────────► │ pending rows, x          │
//      └──────────────────┘             └──────────────────────────┘
//
//   block:   a range of the sequence of all images' rows of grad_input, at adjacent columns and
//            channels
//   shared:  stages, each of rows of grad_output and of x, and a zero row; 5×5: also the filters.
//            At the end the sums overwrite them
//   thread:  pending rows of grad_input, the rows of x at the same positions, and one sum per tap
//            and one for the bias, per channel
#include "depthwise_conv2d/cuda/pixels/nhwc_ring_kernel.cuh"

namespace ops::cuda {
namespace {

// One channel per thread: 5×5 with stride 1; 3×3 if C is odd or a tensor misaligned.
template <typename Axis, typename T>
using OneChannelShape = RingShape<Axis, 1, 7, kRingDepth<Axis, T>, 192>;

// Register shapes that were fastest on an H200.
template <typename Axis, typename T>
using AllGradientsShape = std::conditional_t<
    Axis::kTaps == 5,
    std::conditional_t<Axis::kTransposed, RingShape<Axis, 2, 4, kRingDepth<Axis, T>, 128>,
                       OneChannelShape<Axis, T>>,
    std::conditional_t<Axis::kTransposed || sizeof(T) == 4,
                       RingShape<Axis, 2, 4, kRingDepth<Axis, T>, 192>,
                       RingShape<Axis, 2, 7, kRingDepth<Axis, T>, 128, 3>>>;

}  // namespace

template <typename T>
bool nhwc_ring_all_gradients(const Convolution<T>& input_gradient,
                             const WeightGradient<T>& weight_gradient) {
  const auto& c = input_gradient;
  const DepthwiseGeometry& g = c.g;
  // The bias gradient counts each pixel of grad_output where it meets the filter's centre: all
  // centres must be inside the image.
  if (g.c < kMinChannels || g.padding_h > g.kernel_h / 2 || g.padding_w > g.kernel_w / 2) {
    return false;
  }
  return dispatch_axis(g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps <= 5 && Axis::kDilation == 1 &&
                  (Axis::kTransposed || Axis::kStride == 1)) {
      const auto launch = [&](auto shape) {
        return launch_ring<RingPass::kAllGradients, decltype(shape)>(c, weight_gradient.x,
                                                                     &weight_gradient);
      };
      if constexpr (Axis::kTaps == 3 && !Axis::kTransposed) {
        return launch(AllGradientsShape<Axis, T>{}) || launch(OneChannelShape<Axis, T>{});
      } else {
        return launch(AllGradientsShape<Axis, T>{});
      }
    }
    return false;
  });
}

template bool nhwc_ring_all_gradients(const Convolution<float>&, const WeightGradient<float>&);
template bool nhwc_ring_all_gradients(const Convolution<Half>&, const WeightGradient<Half>&);
template bool nhwc_ring_all_gradients(const Convolution<BFloat16>&,
                                      const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
