// nhwc_ring: NHWC, a ring buffer of input rows, rows of outputs and gradients in registers.
//
//      ring buffer in shared memory        registers
//      ┌──────────────────┐                ┌──────────────────────┐ row r     complete: stored
//      │ input row y      │ ─ × taps ────► │ pending rows, partly │ row r + 1
//      │ input row y + 1 …│                │ summed               │ row r + 2 …
//      │                  │ ─ × ─────────► │ a sum per tap        │ ──► stage 1, then stage 2
//      │ row of factor    │ ─────────────► │ pending rows, factor │
//      └──────────────────┘                └──────────────────────┘
//
//   forward pass, input gradient: pending rows of outputs
//   weight gradient: input x, factor grad_output
//   all gradients:   input grad_output, factor x, pending rows of grad_input
//
//   block:   a range of the sequence of all images' output rows, at adjacent columns and channels
//   shared:  kDepth + 1 stages of rows, and a zero row; from 5×5 on also the filters. At the end
//   the
//            sums of a weight gradient overwrite them
//   thread:  4 to 8 columns of 1 or 2 channels; pending rows, rows of the factor at the same
//            positions, and one sum per tap and one for the bias
#include "depthwise_conv2d/cuda/pixels/nhwc_ring_kernel.cuh"

namespace ops::depthwise_conv2d {
namespace {

// Least channels, but for weight gradients: fewer use too little of each memory transaction, and
// are faster in direct_l1.
constexpr int kMinChannels = 8;

// Register shapes that fill the registers without spills, or were fastest on an H200. One channel
// per thread (V = 1) if C is odd, a tensor misaligned, or a block has too few threads for its
// copies; also in weight gradients of 5×5 and 7×7, all gradients of 5×5 with stride 1, whose sums
// fill the registers, and 7×7 convolutions with stride 1, of which 4 blocks then fit an SM.

template <typename Axis>
constexpr int kConvolutionCols = !Axis::kTransposed ? 7 : (Axis::kTaps == 3 ? 8 : 4);
template <typename Axis>  // 5×5 with stride 1, 7×7
constexpr bool kManySums = Axis::kTaps == 7 || (Axis::kTaps == 5 && Axis::kStride == 1);
template <typename Axis, typename T, int V>
using ConvolutionShape =
    RingShape<Axis, V, kConvolutionCols<Axis>, kRingDepth<Axis, T>, kManySums<Axis> ? 192 : 256>;

template <typename Axis, typename T, int V>
using GradientShape =
    RingShape<Axis, V, (Axis::kTaps == 7 && Axis::kStride == 2 ? 4 : 7), kRingDepth<Axis, T>,
              (Axis::kTaps == 7 || Axis::kDilation > 1 ? 192 : 256)>;

template <typename Axis, typename T>
using OneChannelShape = RingShape<Axis, 1, 7, kRingDepth<Axis, T>, 192>;
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
      if constexpr (std::is_same_v<Axis, ForwardAxis<7, 1, 1>>) {
        return launch(RingShape<Axis, 1, 7, kRingDepth<Axis, T>, 128, 4>{});
      } else if constexpr (Axis::kStride == 1) {
        return launch(ConvolutionShape<Axis, T, 2>{}) || launch(ConvolutionShape<Axis, T, 1>{});
      } else {  // direct_l1 is faster than one channel per thread
        return launch(ConvolutionShape<Axis, T, 2>{});
      }
    }
    return false;
  });
}

template <typename T>
bool nhwc_ring_weight_gradient(const WeightGradient<T>& c) {
  const Geometry& g = c.g;
  // The convolution whose taps have these gradients, without its outputs.
  const Convolution<T> forward{
      g, {c.x, g.h, g.w}, {nullptr, g.out_h, g.out_w}, nullptr, nullptr, c.stream, c.dry_run};
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    const auto launch = [&](auto shape) {
      return launch_ring<RingPass::kWeightGradient, decltype(shape)>(forward, c.grad, &c);
    };
    if constexpr (Axis::kTaps > 3) {
      return launch(GradientShape<Axis, T, 1>{});
    } else if constexpr (std::is_same_v<Axis, ForwardAxis<3, 1, 1>>) {
      return launch(GradientShape<Axis, T, 2>{}) || launch(GradientShape<Axis, T, 1>{});
    } else {  // direct_l1 is faster than one channel per thread
      return launch(GradientShape<Axis, T, 2>{});
    }
  });
}

template <typename T>
bool nhwc_ring_all_gradients(const Convolution<T>& c, const WeightGradient<T>& weight_gradient) {
  const Geometry& g = c.g;
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

#define OPS_INSTANTIATE(T)                                           \
  template bool nhwc_ring(const Convolution<T>&);                    \
  template bool nhwc_ring_weight_gradient(const WeightGradient<T>&); \
  template bool nhwc_ring_all_gradients(const Convolution<T>&, const WeightGradient<T>&)
OPS_INSTANTIATE(float);
OPS_INSTANTIATE(Half);
OPS_INSTANTIATE(BFloat16);
#undef OPS_INSTANTIATE

}  // namespace ops::depthwise_conv2d
