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
#include "depthwise_conv2d/cuda/pixels/nhwc_ring_copy.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {
namespace {

// Register shape of the weight gradient for V channels per thread.
template <typename Axis, typename T, int V>
using GradientShape =
    RingShape<Axis, V, (Axis::kTaps == 7 && Axis::kStride == 2 ? 4 : 7), kRingDepth<Axis, T>,
              (Axis::kTaps == 7 || Axis::kDilation > 1 ? 192 : 256)>;

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    nhwc_ring_weight_gradient_kernel(RingParams params, const T* __restrict__ x,
                                     const T* __restrict__ grad, WeightReduction<T> reduction) {
  using Axis = typename Shape::Axis;
  constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  constexpr int kTaps = Shape::kTaps, kPending = Shape::kPending;
  constexpr int kSums = kTaps * kTaps + 1;  // taps, then the bias
  static_assert(Shape::kStepOut == 1, "weight gradients are never transposed");
  extern __shared__ __align__(16) unsigned char memory[];
  const int block_channels = blockDim.x * V, pitch_bytes = params.pitch_bytes;
  const int chunk = blockIdx.x % params.chunks, tile = blockIdx.x / params.chunks;
  const int first_channel = chunk * block_channels, tile_cols = blockDim.y * kCols;
  clear_shared(memory, params.ring_bytes);

  // A stage: kStepIn rows of the input, then a row of grad_output.
  const int row_bytes = params.in_cols * pitch_bytes;
  const int grad_at = Shape::kStepIn * row_bytes, stage = grad_at + tile_cols * pitch_bytes;
  constexpr bool kShifts = Shape::template kShifts<T>;
  const int first_col = params.start_w + Axis::step(tile * tile_cols);
  RowCopy<T, kShifts, true> ins(x, params.in_h, params.in_w, first_col, params.in_cols,
                                first_channel, params);
  RowCopy<T, kShifts, true> grads(grad, params.out_h, params.out_w, tile * tile_cols, tile_cols,
                                  first_channel, params);
  RingCursor<Shape> now(params, blockIdx.y * params.share), ahead = now;
  // Return whether the step's newest row of grad_output belongs to the block's part of the image
  // (it is never before `first`: the warm-up has kPending − 1 steps). Zeros replace other rows, so
  // that only zeros are pending when the next image begins.
  const auto has_grad = [](const RingCursor<Shape>& at) {
    return at.step + kPending - 1 < at.last;
  };
  const auto seek = [&] {
    ins.seek(ahead.image, ahead.in_row());
    grads.seek(ahead.image, ahead.step + kPending - 1);
  };
  seek();
  // Start the copies of the next step to the stage at byte `to`; see nhwc_ring_kernel.
  const auto fetch = [&](int to) {
    if (ahead.valid()) {
      const int y = ahead.in_row();
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        ins.copy(ahead.is_input_row(y + r), memory + to + r * row_bytes);
      }
      grads.copy(has_grad(ahead), memory + to + grad_at);
      if (ahead.next()) {
        seek();
      }
    }
    commit_copies();
  };
  for (int i = 0; i < Shape::kDepth; ++i) {
    fetch(i * stage);
  }

  using Row = Pixels<T, kInCols, V>;
  const unsigned char* lane = memory + threadIdx.x * V * sizeof(T);
  const unsigned char* my_in = lane + Axis::step(threadIdx.y * kCols) * pitch_bytes;
  const unsigned char* my_grad = lane + threadIdx.y * kCols * pitch_bytes;
  const PixelShift<kShifts> shift(x, params.in_h, params.in_w,
                                  first_col + Axis::step(threadIdx.y * kCols), first_channel,
                                  params);
  const PixelShift<kShifts> grad_shift(grad, params.out_h, params.out_w,
                                       tile * tile_cols + threadIdx.y * kCols, first_channel,
                                       params);
  const int zero_row = (Shape::kDepth + 1) * stage;
  int from = 0, to = Shape::kDepth * stage;  // byte offsets of the stages to read and to fill
  float sum[kSums][V] = {};
  float pending_grad[Shape::kRegisterRows][kCols][V] = {};  // rows of grad_output, by Shape::row
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
        return Row(my_in + (now.is_input_row(y + r) ? from + r * row_bytes : zero_row), pitch_bytes,
                   shift.at(now.image, y + r), shift.next());
      };
      const Pixels<T, kCols, V> grad_row(
          my_grad + (has_grad(now) ? from + grad_at : zero_row), pitch_bytes,
          grad_shift.at(now.image, now.step + kPending - 1), grad_shift.next());
      const Row first_row = row_at(0);
      fetch(to);
      auto& newest = pending_grad[Shape::row(u, kPending - 1)];
      grad_row.to_float(newest);
#pragma unroll
      for (int i = 0; i < kCols * V; ++i) {
        sum[kSums - 1][i % V] += newest[i / V][i % V];
      }
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        if (Shape::kSkipsRows && !now.is_input_row(y + r)) {
          continue;
        }
        float in[kInCols][V];
        (r == 0 ? first_row : row_at(r)).to_float(in);
#pragma unroll
        for (int m = 0; m < kPending; ++m) {
          const int a = Shape::tap(m, r);
          if (a < 0 || (Shape::kSkipsRows && !now.computes(m))) {
            continue;
          }
          for_each_column_tap<Axis, kCols, kInCols>([&](int j, int b, int i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              sum[a * kTaps + b][v] += pending_grad[Shape::row(u, m)][j][v] * in[i][v];
            }
          });
        }
      }
      now.next();
      from = from + stage == zero_row ? 0 : from + stage;
      to = to + stage == zero_row ? 0 : to + stage;
    }
    Shape::end_period(pending_grad);
  }
  wait_for_copies<0>();
  __syncthreads();
  reduce_and_put(sum, reinterpret_cast<float*>(memory), threadIdx.x, blockDim.x, threadIdx.y,
                 blockDim.y, min(block_channels, params.channels - first_channel),
                 BlockSums<T>(reduction, tile * gridDim.y + blockIdx.y, first_channel));
}

}  // namespace

template <typename T>
bool nhwc_ring_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  // Evict-first loads keep a part of inputs that exceed the L2 cache in it: up to 1.09 times as
  // fast, 1.03 in the mean (H200).
  const Device device;
  const int64_t bytes = elements_per_sm(g) * device.multiprocessors * sizeof(T);
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    const auto launch = [&](auto shape) {
      using Shape = decltype(shape);
      auto plan = plan_ring<Shape, 1, T>(g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h,
                                         g.padding_w, 0, {c.x, c.grad});
      if (plan.fits) {
        plan.params.streaming = bytes > device.cache && bytes <= 4 * device.cache;
        reduce_weights(c, plan.splits(), [&](const WeightReduction<T>& reduction) {
          launch_kernel(nhwc_ring_weight_gradient_kernel<Shape, T>, plan.grid, plan.block,
                        plan.shared, c.stream, plan.params, c.x, c.grad, reduction);
        });
      }
      return plan.fits;
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
