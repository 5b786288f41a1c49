// nhwc_stream: NHWC, input rows stream through registers.
//
//      input rows, top to bottom       pending outputs
//      ┌──────────┐                    ┌──────────┐ row r     complete: stored
//      │ row y    │ ── each tap row ─► │ partly   │ row r + 1
//      │ row y+1  │    (prefetched)    │ summed   │ row r + 2 …
//      └──────────┘                    └──────────┘
//
//   block:   a segment of rows of adjacent column tiles and channels, of several images
//   shared:  the filters; input rows in flight, a ring buffer per thread
//   thread:  a column tile of 1 to 4 channels; adds each input row to all pending output rows
//
// Weight gradient
//   block:   the same
//   shared:  rows of input and grad_output in flight; at the end the sums
//   thread:  one sum per tap and channel; keeps the last kPending rows of grad_output in registers
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/nhwc_stream.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {
namespace {

constexpr int kMinChannels = 8;  // fewer use too little of each memory transaction

template <typename Shape, typename T>
using StreamReader =
    RowReader<Shape::kChannels, Shape::template kPrefetch<T>, kRingRows, Shape::kInCols, T>;

template <typename Axis, typename T>
__global__ void __launch_bounds__(kStreamThreads, StreamShape<Axis>::kBlocks)
    nhwc_stream_kernel(StreamParams params, bool flip, const T* __restrict__ in,
                       const T* __restrict__ weight, const T* __restrict__ bias,
                       T* __restrict__ out) {
  using Shape = StreamShape<Axis>;
  constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  constexpr int kTaps = Shape::kTaps, kPending = Shape::kPending;
  using Position = StreamPosition<V>;
  extern __shared__ __align__(16) unsigned char memory[];
  float* weights = reinterpret_cast<float*>(memory);  // [tap][kPitch]
  const Position at(params);
  constexpr int kPitch = kMaxLanes * V;
  if (threadIdx.z == 0) {
    for (int tap = threadIdx.y; tap < kTaps * kTaps; tap += blockDim.y) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int c = at.channel + v;
        weights[(flip ? kTaps * kTaps - 1 - tap : tap) * kPitch + threadIdx.x * V + v] =
            c < params.channels ? static_cast<float>(weight[c * kTaps * kTaps + tap]) : 0.0f;
      }
    }
  }
  __syncthreads();
  if (!at.valid) {
    return;
  }
  const float* w = weights + threadIdx.x * V;
  const StreamStart<Axis, Shape, Position> start(params, at);
  const unsigned out_mask = Position::template column_mask<kCols>(start.w0, params.out_w);
  StreamReader<Shape, T> rows(at, memory + sizeof(float) * kTaps * kTaps * kPitch,
                              Position::template column_mask<kInCols>(start.in_w0, params.in_w));
  const int64_t in_row = static_cast<int64_t>(params.in_w) * params.channels;
  const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
  int y = start.first_y;
  in += (at.n * params.in_h + y) * in_row + static_cast<int64_t>(start.in_w0) * params.channels +
        at.channel;
  out += (at.n * params.out_h + start.h0 - Shape::kWarmUp * Shape::kStepOut) * out_row +
         static_cast<int64_t>(start.w0) * params.channels + at.channel;
  const auto is_input_row = [&](int row) { return row >= 0 && row < start.end_y; };
  constexpr int kPrefetch = StreamReader<Shape, T>::kPrefetch;
  for (int i = 0; i < kPrefetch; ++i) {
    if (is_input_row(y + i)) {
      rows.fetch(in + i * in_row, i);
    }
    commit_row();
  }

  float initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias ? static_cast<float>(bias[at.channel + v]) : 0.0f;
  }
  using Tap = Vector<float, V>;
  // Rows of outputs. Step u of a period accumulates in kPending rows from u · kStepOut on.
  constexpr int kSums = kPending + (Shape::kPeriod - 1) * Shape::kStepOut;
  float sum[kSums][kCols][V] = {};
  int row = 0;  // of the ring
#pragma unroll 1
  for (int first = -Shape::kWarmUp; first < start.last_step; first += Shape::kPeriod) {
#pragma unroll
    for (int u = 0; u < Shape::kPeriod; ++u) {
      const int step = first + u;
      if (step >= start.last_step) {
        return;
      }
      auto& pending = reinterpret_cast<float (&)[kPending][kCols][V]>(sum[u * Shape::kStepOut]);
#pragma unroll
      for (int i = 0; i < Shape::kStepOut * kCols * V; ++i) {
        pending[kPending - Shape::kStepOut + i / (kCols * V)][i / V % kCols][i % V] =
            initial[i % V];
      }
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r, ++y, in += in_row) {
        wait_for_row();
        const bool has_row = is_input_row(y);
        float x[kInCols][V];
        if (has_row) {
          rows.read(in, row, x);
        }
        if (is_input_row(y + kPrefetch)) {
          rows.fetch(in + kPrefetch * in_row, (row + kPrefetch) % kRingRows);
        }
        commit_row();
        row = (row + 1) % kRingRows;
        if (!has_row) {
          continue;
        }
#pragma unroll
        for (int m = 0; m < kPending; ++m) {
          const int a = Shape::tap(m, r);
          if (a < 0) {
            continue;
          }
#pragma unroll
          for (int b = 0; b < kTaps; ++b) {
            const Tap tap = *reinterpret_cast<const Tap*>(w + (a * kTaps + b) * kPitch);
#pragma unroll
            for (int i = 0; i < kInCols; ++i) {
#pragma unroll
              for (int j = 0; j < kCols; ++j) {
                if (Axis::tap(j, i) == b) {
#pragma unroll
                  for (int v = 0; v < V; ++v) {
                    pending[m][j][v] += tap.lane[v] * x[i][v];
                  }
                }
              }
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < Shape::kStepOut; ++m, out += out_row) {
        const bool complete = step >= 0 && start.h0 + step * Shape::kStepOut + m < params.out_h;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (complete && out_mask & 1u << j) {
            store_vector(out + j * params.channels, pending[m][j]);
          }
        }
      }
    }
    shift_rows<Shape::kPeriod * Shape::kStepOut>(sum);
  }
}

// Register shape of the weight gradient, V channels per thread.
template <typename StreamAxis, int V>
struct WeightStreamShape : StreamShape<StreamAxis> {
  using Axis = StreamAxis;
  using Base = StreamShape<Axis>;
  static_assert(Base::kStepOut == 1, "weight gradients are never transposed");
  static constexpr int kChannels = V;
  static constexpr int kCols = Base::kTaps == 5 ? 4 : Base::kCols;
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr bool kPrefetches = Axis::step(1) == 1;
  static constexpr bool kFewRegisters = Base::kTaps == 3 && Base::kPending <= 3;
  static constexpr int kBlocks = kFewRegisters ? (V == 2 ? 6 : 4) : 3;
};

template <typename Shape, typename T>
struct WeightReaders {
  static constexpr int kPrefetch = !Shape::kPrefetches                 ? 0
                                   : Shape::kChannels * sizeof(T) >= 4 ? 2
                                                                       : 1;
  static_assert(kPrefetch != 1 || Shape::kStepIn == 1, "one row is held");
  using In = RowReader<Shape::kChannels, kPrefetch, kRingRows * Shape::kStepIn, Shape::kInCols, T>;
  using Grad = RowReader<Shape::kChannels, kPrefetch, kRingRows, Shape::kCols, T>;
  static constexpr size_t kBytes = In::kBytes + Grad::kBytes;
};

template <typename Shape, typename T>
__global__ void __launch_bounds__(kStreamThreads, Shape::kBlocks)
    nhwc_stream_weight_gradient_kernel(StreamParams params, const T* __restrict__ x,
                                       const T* __restrict__ grad, WeightReduction<T> reduction) {
  using Axis = typename Shape::Axis;
  constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  constexpr int kTaps = Shape::kTaps, kPending = Shape::kPending;
  constexpr int kSums = kTaps * kTaps + 1;
  using Position = StreamPosition<V>;
  using Readers = WeightReaders<Shape, T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const Position at(params);
  float sum[kSums][V] = {};
  if (at.valid) {
    const StreamStart<Axis, Shape, Position> start(params, at);
    typename Readers::In rows(at, memory,
                              Position::template column_mask<kInCols>(start.in_w0, params.in_w));
    typename Readers::Grad grads(at, memory + Readers::In::kBytes,
                                 Position::template column_mask<kCols>(start.w0, params.out_w));
    const int64_t in_row = static_cast<int64_t>(params.in_w) * params.channels;
    const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
    int y = start.first_y;
    x += (at.n * params.in_h + y) * in_row + static_cast<int64_t>(start.in_w0) * params.channels +
         at.channel;
    grad += (at.n * params.out_h + start.h0) * out_row +
            static_cast<int64_t>(start.w0) * params.channels + at.channel;
    const auto is_input_row = [&](int in_y) { return in_y >= 0 && in_y < start.end_y; };
    const auto fetch = [&](int step, int ahead, int row) {  // `ahead` steps after the pointers
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        const int in_r = ahead * Shape::kStepIn + r;
        if (is_input_row(y + in_r)) {
          rows.fetch(x + in_r * in_row, row * Shape::kStepIn + r);
        }
      }
      if (step + kPending - 1 < start.last_step) {
        grads.fetch(grad + ahead * out_row, row);
      }
      commit_row();
    };
    constexpr int kPrefetch = Readers::kPrefetch;
    for (int i = 0; i < kPrefetch; ++i) {
      fetch(i - Shape::kWarmUp, i, i);
    }
    // Rows of grad_output. Step u of a period multiplies kPending rows from u on.
    constexpr int kRows = kPending + Shape::kPeriod - 1;
    float g[kRows][kCols][V] = {};
    int row = 0;  // of the rings
#pragma unroll 1
    for (int first = -Shape::kWarmUp; first < start.last_step; first += Shape::kPeriod) {
#pragma unroll
      for (int u = 0; u < Shape::kPeriod; ++u) {
        const int step = first + u;
        if (step >= start.last_step) {
          break;
        }
        wait_for_row();
        auto& newest = g[u + kPending - 1];
        if (step + kPending - 1 < start.last_step) {
          grads.read(grad, row, newest);
        } else {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              newest[j][v] = 0;
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            sum[kSums - 1][v] += newest[j][v];
          }
        }
        float in[kInCols][V];
        constexpr bool kInRegisters = kPrefetch == 1;
        if (kInRegisters && is_input_row(y)) {  // before fetch overwrites it
          rows.read(x, row, in);
        }
        fetch(step + kPrefetch, kPrefetch, (row + kPrefetch) % kRingRows);
#pragma unroll
        for (int r = 0; r < Shape::kStepIn; ++r, ++y, x += in_row) {
          if (!is_input_row(y)) {
            continue;
          }
          if (!kInRegisters) {
            rows.read(x, row * Shape::kStepIn + r, in);
          }
          for_each_tap<Shape, Axis, kPending, kCols, kInCols>(r, [&](int m, int j, int tap, int i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              sum[tap][v] += g[u + m][j][v] * in[i][v];
            }
          });
        }
        grad += out_row;
        row = (row + 1) % kRingRows;
      }
      shift_rows<Shape::kPeriod>(g);
    }
  }
  __syncthreads();

  const int lanes = blockDim.x;
  reduce_and_put(sum, reinterpret_cast<float*>(memory), threadIdx.x, lanes,
                 threadIdx.z * blockDim.y + threadIdx.y, blockDim.y * blockDim.z,
                 min(lanes * V, params.channels - at.first_channel),
                 BlockSums<T>(reduction, blockIdx.x, at.first_channel));
}

// Launch with V channels per thread. Return false if vectors of V channels are not aligned.
template <typename Axis, int V, typename T>
bool launch_stream_weight_gradient(const WeightGradient<T>& c) {
  using Shape = WeightStreamShape<Axis, V>;
  const DepthwiseGeometry& g = c.g;
  const auto plan = plan_stream<Axis, Shape, T>(g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h,
                                                g.padding_w, {c.x, c.grad});
  if (!plan.aligned) {
    return false;
  }
  const size_t sums = sizeof(float) * reduction_elements(plan.block.x, plan.block.y * plan.block.z,
                                                         (Shape::kTaps * Shape::kTaps + 1) * V);
  two_stage_reduction(c, plan.grid.x, [&](const WeightReduction<T>& reduction) {
    launch_kernel(nhwc_stream_weight_gradient_kernel<Shape, T>, plan.grid, plan.block,
                  std::max(WeightReaders<Shape, T>::kBytes, sums), c.stream, plan.params, c.x,
                  c.grad, reduction);
  });
  return true;
}

}  // namespace

template <typename T>
bool nhwc_stream(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    using Shape = StreamShape<Axis>;
    if constexpr (Axis::inputs(1) <= Axis::kTaps) {  // dilation 1
      const auto plan =
          plan_stream<Axis, Shape, T>(c.g.n, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h,
                                      c.padding_w, {c.in.data, c.out.data});
      if (plan.aligned && c.g.c >= kMinChannels) {
        constexpr size_t kFilters =
            sizeof(float) * Shape::kTaps * Shape::kTaps * kMaxLanes * Shape::kChannels;
        c.launch(nhwc_stream_kernel<Axis, T>, plan.grid, plan.block,
                 kFilters + StreamReader<Shape, T>::kBytes, plan.params, c.flip, c.in.data,
                 c.weight, c.bias, c.out.data);
        return true;
      }
    }
    return false;
  });
}

template <typename T>
bool nhwc_stream_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_direct(c.g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps == 7) {
      return launch_stream_weight_gradient<Axis, 1>(c);
    } else if constexpr (Axis::kTaps == 5) {
      // V = 1 is always aligned, but slower than direct_l1 with stride 2.
      return launch_stream_weight_gradient<Axis, 2>(c) ||
             (Axis::step(1) == 1 && launch_stream_weight_gradient<Axis, 1>(c));
    } else {
      // Narrow images have too few column tiles for 4 channels per thread.
      if constexpr (WeightStreamShape<Axis, 2>::kFewRegisters) {
        constexpr int kNarrow = 14;
        if (c.g.out_w <= kNarrow && launch_stream_weight_gradient<Axis, 2>(c)) {
          return true;
        }
      }
      return launch_stream_weight_gradient<Axis, 4>(c);
    }
  });
}

template bool nhwc_stream(const Convolution<float>&);
template bool nhwc_stream(const Convolution<Half>&);
template bool nhwc_stream(const Convolution<BFloat16>&);
template bool nhwc_stream_weight_gradient(const WeightGradient<float>&);
template bool nhwc_stream_weight_gradient(const WeightGradient<Half>&);
template bool nhwc_stream_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
