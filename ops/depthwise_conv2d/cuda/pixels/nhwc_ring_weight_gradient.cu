// nhwc_ring, weight and bias gradient: stage 1 of a two-stage reduction.
//
//      ring buffer in shared memory        registers
//      ┌──────────────────┐                ┌──────────────────┐
//      │ input rows       │ ─────────────► │ × pending rows   │     a sum per tap
//      │ grad_output row  │ ─► newest row  │   of grad_output │ ──► stage 1, then stage 2
//      └──────────────────┘                └──────────────────┘
//
//   block:   a range of the sequence of all images' output rows, at adjacent columns and channels
//   shared:  stages, each of input rows and a row of grad_output, and a zero row. At the end the
//            sums overwrite them
//   thread:  one sum per tap and one for the bias, per channel, over a tile of columns; keeps the
//            newest kPending rows of grad_output of its tile
#include "depthwise_conv2d/cuda/pixels/nhwc_ring_kernel.cuh"

namespace ops::cuda {
namespace {

// Register shape of the weight gradient for V channels per thread.
template <typename Axis, typename T, int V>
using GradientShape =
    RingShape<Axis, V, (Axis::kTaps == 7 && Axis::kStride == 2 ? 4 : 7), kRingDepth<Axis, T>,
              (Axis::kTaps == 7 || Axis::kDilation > 1 ? 192 : 256)>;

}  // namespace

template <typename T>
bool nhwc_ring_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  // The convolution whose taps have these gradients, without its outputs.
  const Convolution<T> forward{
      g, {c.x, g.h, g.w}, {nullptr, g.out_h, g.out_w}, nullptr, nullptr, c.stream, c.dry_run};
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    const auto launch = [&](auto shape) {
      return launch_ring<RingPass::kWeightGradient, decltype(shape)>(forward, c.grad, &c);
    };
    // From 5×5 on one channel per thread: its sums fill the registers. 3×3: two, or one if C is odd
    // or a tensor misaligned; with stride 2 or dilation 2, direct_l1 is faster than one.
    if constexpr (Axis::kTaps > 3) {
      return launch(GradientShape<Axis, T, 1>{});
    } else if constexpr (std::is_same_v<Axis, ForwardAxis<3, 1, 1>>) {
      return launch(GradientShape<Axis, T, 2>{}) || launch(GradientShape<Axis, T, 1>{});
    } else {
      return launch(GradientShape<Axis, T, 2>{});
    }
  });
}

template bool nhwc_ring_weight_gradient(const WeightGradient<float>&);
template bool nhwc_ring_weight_gradient(const WeightGradient<Half>&);
template bool nhwc_ring_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
