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
//            the sums of a weight gradient overwrite them
//   thread:  4 to 8 columns of 1 or 2 channels; pending rows, rows of the factor at the same
//            positions, and one sum per tap and one for the bias
#include "depthwise_conv2d/cuda/pixels/nhwc_ring_memory.cuh"

namespace ops::depthwise_conv2d {
namespace {

template <typename Shape, RingPass kPass, typename T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    nhwc_ring_kernel(RingParams params, bool flip, const T* __restrict__ in,
                     const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
                     const T* __restrict__ factor, WeightReduction<T> reduction) {
  using Axis = typename Shape::Axis;
  using Sums = RingSums<Shape, kPass>;
  constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  constexpr int kTaps = Shape::kTaps, kPending = Shape::kPending, kStepOut = Shape::kStepOut;
  constexpr int kFactorRows = Sums::kFactorRows;
  constexpr bool kConvolves = Sums::kConvolves, kWeightGradient = Sums::kWeightGradient;
  extern __shared__ __align__(16) unsigned char memory[];
  const int block_channels = blockDim.x * V, tile_cols = blockDim.y * kCols;
  const int chunk = blockIdx.x % params.chunks, tile = blockIdx.x / params.chunks;
  const int first_channel = chunk * block_channels, channel = first_channel + threadIdx.x * V;
  const int w0 = (tile * blockDim.y + threadIdx.y) * kCols;  // the thread's first output column
  const bool has_channel = channel < params.channels;
  const int cols = has_channel ? min(kCols, params.out_w - w0) : 0;
  for (int i = flat_thread(); i < params.ring_bytes / 16; i += blockDim.x * blockDim.y) {
    reinterpret_cast<uint4*>(memory)[i] = {};
  }
  __syncthreads();

  // A stage: kStepIn input rows, then for a weight gradient kStepOut rows of the factor.
  const int row_bytes = params.in_cols * params.pitch_bytes;
  const int factor_at = Shape::kStepIn * row_bytes, factor_bytes = tile_cols * params.pitch_bytes;
  const int stage = factor_at + kFactorRows * factor_bytes;
  RingRows<T, kInCols, V, !kConvolves> input_rows(
      in, params.in_h, params.in_w, params.start_w + Axis::step(tile * tile_cols), params.in_cols,
      Axis::step(threadIdx.y * kCols), first_channel, params, memory);
  RingRows<T, kCols, V, !kConvolves> factor_rows(factor, params.out_h, params.out_w,
                                                 tile * tile_cols, tile_cols, threadIdx.y * kCols,
                                                 first_channel, params, memory);
  RingCursor<Shape> now(params, blockIdx.y * params.share), ahead = now;
  // Producer: start the copies of step `ahead` to the stage at byte `to`. Commit a group even
  // without copies: wait_for_copies counts one per step.
  const auto seek = [&] {
    input_rows.seek(ahead.image, ahead.in_row());
    if constexpr (kWeightGradient) {
      factor_rows.seek(ahead.image, ahead.newest());
    }
  };
  const auto fetch = [&](int to) {
    if (ahead.valid()) {
      const int y = ahead.in_row();
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        input_rows.copy(to + r * row_bytes, ahead.is_input_row(y + r));
      }
#pragma unroll
      for (int m = 0; m < kFactorRows; ++m) {
        factor_rows.copy(to + factor_at + m * factor_bytes, ahead.has_newest(m));
      }
      if (ahead.next()) {
        seek();
      }
    }
    commit_copies();
  };
  seek();
  for (int i = 0; i < Shape::kDepth; ++i) {
    fetch(i * stage);
  }

  RingTaps<Shape> taps;
  float initial[V] = {};
  if constexpr (kConvolves) {
    taps.load(reinterpret_cast<float*>(memory + params.ring_bytes), [&](int k, int v) {
      const int from = flip ? kTaps * kTaps - 1 - k : k;
      return has_channel ? static_cast<float>(weight[(channel + v) * kTaps * kTaps + from]) : 0.0f;
    });
#pragma unroll
    for (int v = 0; v < V; ++v) {
      initial[v] = bias && has_channel ? static_cast<float>(bias[channel + v]) : 0.0f;
    }
  }

  const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
  // Return the thread's first output of the current step (in the warm-up it may lie before the
  // image; nothing is stored).
  const auto output = [&] {
    return out + (static_cast<int64_t>(now.image) * params.out_h + now.step * kStepOut) * out_row +
           static_cast<int64_t>(w0) * params.channels + channel;
  };
  T* result = output();
  Sums sums;
  const int zero_row = (Shape::kDepth + 1) * stage;  // byte offset; follows the last stage
  int from = 0, to = Shape::kDepth * stage;  // byte offsets of the stages to read and to fill
#pragma unroll 1
  while (now.valid()) {
#pragma unroll
    for (int u = 0; u < Shape::kPeriod; ++u) {
      if (!now.valid()) {
        break;
      }
      wait_for_copies<Shape::kDepth - 1>();
      __syncthreads();
      const int y = now.in_row();
      const auto row_at = [&](int r) {
        return input_rows.read(now.is_input_row(y + r) ? from + r * row_bytes : zero_row, now.image,
                               y + r);
      };
      const auto first_row = row_at(0);  // before fetch, to overlap the latency of both
#pragma unroll
      for (int m = 0; m < kFactorRows; ++m) {
        const int at = now.has_newest(m) ? from + factor_at + m * factor_bytes : zero_row;
        factor_rows.read(at, now.image, now.newest() + m)
            .to_float(sums.factor[Shape::row(u, kPending - kStepOut + m)]);
      }
      fetch(to);
      // Accumulate.
      sums.begin(u, initial);
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        if (Shape::kSkipsRows && !now.is_input_row(y + r)) {
          continue;
        }
        float pixels[kInCols][V];
        (r == 0 ? first_row : row_at(r)).to_float(pixels);
        sums.add(u, r, now, taps, pixels);
      }
      // Store the completed rows.
#pragma unroll
      for (int m = 0; kConvolves && m < kStepOut; ++m) {
        const bool stores = now.step >= now.first && now.step * kStepOut + m < params.out_h;
        const int stored = stores ? cols : 0;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (j < stored) {
            store_vector(result + j * params.channels, sums.output[Shape::row(u, m)][j]);
          }
        }
        result += out_row;
      }
      if (now.next()) {
        result = output();
      }
      from = from + stage == zero_row ? 0 : from + stage;
      to = to + stage == zero_row ? 0 : to + stage;
    }
    sums.end_period();
  }
  if constexpr (kWeightGradient) {
    wait_for_copies<0>();
    __syncthreads();
    float* shared = reinterpret_cast<float*>(memory);
    reduce_block(sums.weight, shared, threadIdx.x, blockDim.x, threadIdx.y, blockDim.y);
    const int count = min(block_channels, params.channels - first_channel) * Sums::kSums;
    for (int i = flat_thread(); i < count; i += blockDim.x * blockDim.y) {
      reduction.put(tile * gridDim.y + blockIdx.y, first_channel, i, shared[i]);
    }
  }
}

// Plan and launch a pass; return false if no block shape fits. Weight gradient: `gradient` has its
// results, `factor` is of the size of the outputs.
template <RingPass kPass, typename Shape, typename T>
bool launch_ring(const Convolution<T>& c, const T* factor = nullptr,
                 const WeightGradient<T>* gradient = nullptr) {
  using Sums = RingSums<Shape, kPass>;
  auto plan = plan_ring<Shape, Sums::kFactorRows>(c, factor,
                                                  Sums::kConvolves ? RingTaps<Shape>::kBytes : 0);
  if (!plan) {
    return false;
  }
  if constexpr (!Sums::kConvolves) {
    // Evict-first loads keep a part of inputs that exceed the L2 cache in it: up to 1.09 times as
    // fast, 1.03 in the mean (H200).
    const Device device;
    const int64_t bytes = load_of(c.g) * device.multiprocessors * sizeof(T);
    plan->params.streaming = bytes > device.cache && bytes <= 4 * device.cache;
  }
  const auto launch = [&](const WeightReduction<T>& reduction) {
    c.launch(nhwc_ring_kernel<Shape, kPass, T>, plan->grid, plan->block, plan->shared, plan->params,
             c.flip, c.in.data, c.weight, c.bias, c.out.data, factor, reduction);
  };
  if constexpr (Sums::kWeightGradient) {
    reduce_weights(*gradient, plan->splits(), launch);
  } else {
    launch({});
  }
  return true;
}

// Least number of channels of convolutions (not of weight gradients): with fewer, memory
// transactions are partly unused, and direct_l1 is faster.
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
  return c.g.c >= kMinChannels && dispatch_axis(c.g, c.transposed, [&](auto axis) {
           using Axis = decltype(axis);
           if constexpr (Axis::kDilation == 1) {  // direct_l1 runs dilation 2
             const auto launch = [&](auto shape) {
               return launch_ring<RingPass::kConvolution, decltype(shape)>(c);
             };
             if constexpr (std::is_same_v<Axis, ForwardAxis<7, 1, 1>>) {
               return launch(RingShape<Axis, 1, 7, kRingDepth<Axis, T>, 128, 4>{});
             } else if constexpr (Axis::kStride == 1) {
               return launch(ConvolutionShape<Axis, T, 2>{}) ||
                      launch(ConvolutionShape<Axis, T, 1>{});
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
