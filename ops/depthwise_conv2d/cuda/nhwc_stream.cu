// nhwc_stream: rows of channels-last images stream through registers.
//
//      input rows, top to bottom       pending outputs
//      ┌──────────┐                    ┌──────────┐ row r     complete: stored
//      │ row y    │ ── each tap row ─► │ partly   │ row r + 1
//      │ row y+1  │    (prefetched)    │ summed   │ row r + 2 …
//      └──────────┘                    └──────────┘
//
//   block:   a segment of rows of column tiles, some channels, of several images
//   shared:  the filters; input rows in flight, a ring buffer of each thread's own
//   thread:  one column tile of 1 to 4 channels: every input row is read once and added to all
//            pending output rows in registers that it reaches
//
// Weight gradient: the last rows of grad_output wait in registers for the inputs that they meet;
// one sum a tap, stage 1 of a two-stage reduction.
#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/nhwc_window.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {
namespace {

constexpr int kMinChannels = 8;  // fewer make too little of a warp's loads

template <typename Axis, typename T>
using StreamReader = RowReader<StreamShape<Axis>::kChannels, StreamShape<Axis>::template kAhead<T>,
                               kRingRows, StreamShape<Axis>::kInCols, T>;

template <typename Axis, typename T>
__global__ void __launch_bounds__(kStreamThreads, StreamShape<Axis>::kBlocks)
    nhwc_stream_kernel(StreamParams params, bool flip, const T* __restrict__ in,
                       const T* __restrict__ weight, const T* __restrict__ bias,
                       T* __restrict__ out) {
  using M = StreamShape<Axis>;
  constexpr int V = M::kChannels, kCols = M::kCols, kTaps = M::kTaps, kPending = M::kPending;
  using Place = StreamPosition<V>;
  extern __shared__ __align__(16) unsigned char memory[];
  float* weights = reinterpret_cast<float*>(memory);  // [kTaps · kTaps][kPitch], by thread
  const Place at(params);
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
  if (!at.present) {
    return;
  }
  const float* w = weights + threadIdx.x * V;
  const StreamStart<Axis, M, Place> start(params, at);
  const unsigned out_columns = Place::template columns<kCols>(start.w0, params.out_w);
  StreamReader<Axis, T> rows(at, memory + sizeof(float) * kTaps * kTaps * kPitch,
                             Place::template columns<M::kInCols>(start.in_w0, params.in_w));
  const int64_t in_row = static_cast<int64_t>(params.in_w) * params.channels;
  const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
  int y = start.first_y;
  in += (at.n * params.in_h + y) * in_row + static_cast<int64_t>(start.in_w0) * params.channels +
        at.channel;
  out += (at.n * params.out_h + start.h0 - M::kWarmUp * M::kStepOut) * out_row +
         static_cast<int64_t>(start.w0) * params.channels + at.channel;
  const auto within = [&](int row) { return row >= 0 && row < start.end_y; };
  constexpr int kAhead = StreamReader<Axis, T>::kAhead;
  for (int i = 0; i < kAhead; ++i) {
    if (within(y + i)) {
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
  // Rows of outputs; each step touches those from its u · kStepOut on.
  constexpr int kSums = kPending + (M::kPeriod - 1) * M::kStepOut;
  float sum[kSums][kCols][V] = {};
  int row = 0;  // of the ring
#pragma unroll 1
  for (int first = -M::kWarmUp; first < start.last_step; first += M::kPeriod) {
#pragma unroll
    for (int u = 0; u < M::kPeriod; ++u) {
      const int step = first + u;
      if (step >= start.last_step) {
        return;
      }
      auto& pending = reinterpret_cast<float (&)[kPending][kCols][V]>(sum[u * M::kStepOut]);
#pragma unroll
      for (int i = 0; i < M::kStepOut * kCols * V; ++i) {
        pending[kPending - M::kStepOut + i / (kCols * V)][i / V % kCols][i % V] = initial[i % V];
      }
#pragma unroll
      for (int r = 0; r < M::kStepIn; ++r, ++y, in += in_row) {
        wait_for_row();
        const bool there = within(y);
        float x[M::kInCols][V];
        if (there) {
          rows.read(in, row, x);
        }
        if (within(y + kAhead)) {
          rows.fetch(in + kAhead * in_row, (row + kAhead) % kRingRows);
        }
        commit_row();
        row = (row + 1) % kRingRows;
        if (!there) {
          continue;
        }
#pragma unroll
        for (int m = 0; m < kPending; ++m) {
          const int a = M::tap(m, r);
          if (a < 0) {
            continue;
          }
#pragma unroll
          for (int b = 0; b < kTaps; ++b) {
            const Tap tap = *reinterpret_cast<const Tap*>(w + (a * kTaps + b) * kPitch);
#pragma unroll
            for (int i = 0; i < M::kInCols; ++i) {
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
      for (int m = 0; m < M::kStepOut; ++m, out += out_row) {
        const bool complete = step >= 0 && start.h0 + step * M::kStepOut + m < params.out_h;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (complete && out_columns & 1u << j) {
            store_vector(out + j * params.channels, pending[m][j]);
          }
        }
      }
    }
    move_rows<M::kPeriod * M::kStepOut>(sum);
  }
}

// What nhwc_stream_weight_gradient_kernel has registers for, V channels a thread.
template <typename StreamAxis, int V>
struct WeightStreamShape : StreamShape<StreamAxis> {
  using Axis = StreamAxis;
  using Base = StreamShape<Axis>;
  static_assert(Base::kStepOut == 1, "weight gradients are never transposed");
  static constexpr int kChannels = V;
  static constexpr int kCols = Base::kTaps == 5 ? 4 : Base::kCols;
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr bool kAsksAhead = Axis::step(1) == 1;
  static constexpr bool kLight = Base::kTaps == 3 && Base::kPending <= 3;  // in registers
  static constexpr int kBlocks = kLight ? (V == 2 ? 6 : 4) : 3;
};

template <typename M, typename T>
struct WeightReaders {
  static constexpr int kAhead = !M::kAsksAhead ? 0 : M::kChannels * sizeof(T) >= 4 ? 2 : 1;
  static_assert(kAhead != 1 || M::kStepIn == 1, "one row is held");
  using In = RowReader<M::kChannels, kAhead, kRingRows * M::kStepIn, M::kInCols, T>;
  using Grad = RowReader<M::kChannels, kAhead, kRingRows, M::kCols, T>;
  static constexpr size_t kBytes = In::kBytes + Grad::kBytes;
};

// A block goes through one segment of blockDim.z images; the last kPending rows of grad_output wait
// in registers for the inputs that they meet.
template <typename M, typename T>
__global__ void __launch_bounds__(kStreamThreads, M::kBlocks)
    nhwc_stream_weight_gradient_kernel(StreamParams params, const T* __restrict__ x,
                                       const T* __restrict__ grad, WeightReduction<T> reduction) {
  using Axis = typename M::Axis;
  constexpr int V = M::kChannels, kCols = M::kCols, kTaps = M::kTaps, kPending = M::kPending;
  constexpr int kSums = kTaps * kTaps + 1;
  using Place = StreamPosition<V>;
  using Readers = WeightReaders<M, T>;
  extern __shared__ __align__(16) unsigned char memory[];
  const Place at(params);
  float sum[kSums][V] = {};
  if (at.present) {
    const StreamStart<Axis, M, Place> start(params, at);
    typename Readers::In rows(at, memory,
                              Place::template columns<M::kInCols>(start.in_w0, params.in_w));
    typename Readers::Grad grads(at, memory + Readers::In::kBytes,
                                 Place::template columns<kCols>(start.w0, params.out_w));
    const int64_t in_row = static_cast<int64_t>(params.in_w) * params.channels;
    const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
    int y = start.first_y;
    x += (at.n * params.in_h + y) * in_row + static_cast<int64_t>(start.in_w0) * params.channels +
         at.channel;
    grad += (at.n * params.out_h + start.h0) * out_row +
            static_cast<int64_t>(start.w0) * params.channels + at.channel;
    const auto within = [&](int in_y) { return in_y >= 0 && in_y < start.end_y; };
    const auto fetch = [&](int step, int ahead, int row) {  // a step `ahead` of the pointers
#pragma unroll
      for (int r = 0; r < M::kStepIn; ++r) {
        const int in_r = ahead * M::kStepIn + r;
        if (within(y + in_r)) {
          rows.fetch(x + in_r * in_row, row * M::kStepIn + r);
        }
      }
      if (step + kPending - 1 < start.last_step) {
        grads.fetch(grad + ahead * out_row, row);
      }
      commit_row();
    };
    constexpr int kAhead = Readers::kAhead;
    for (int i = 0; i < kAhead; ++i) {
      fetch(i - M::kWarmUp, i, i);
    }
    // Rows of grad_output; each step multiplies with those from its u on.
    constexpr int kRows = kPending + M::kPeriod - 1;
    float g[kRows][kCols][V] = {};
    int row = 0;  // of the rings
#pragma unroll 1
    for (int first = -M::kWarmUp; first < start.last_step; first += M::kPeriod) {
#pragma unroll
      for (int u = 0; u < M::kPeriod; ++u) {
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
        float in[M::kInCols][V];
        constexpr bool kHeld = kAhead == 1;
        if (kHeld && within(y)) {  // before the next one takes its place
          rows.read(x, row, in);
        }
        fetch(step + kAhead, kAhead, (row + kAhead) % kRingRows);
#pragma unroll
        for (int r = 0; r < M::kStepIn; ++r, ++y, x += in_row) {
          if (!within(y)) {
            continue;
          }
          if (!kHeld) {
            rows.read(x, row * M::kStepIn + r, in);
          }
          join_row<M, Axis, kPending, kCols, M::kInCols>(r, [&](int m, int j, int tap, int i) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              sum[tap][v] += g[u + m][j][v] * in[i][v];
            }
          });
        }
        grad += out_row;
        row = (row + 1) % kRingRows;
      }
      move_rows<M::kPeriod>(g);
    }
  }
  __syncthreads();

  const int lanes = blockDim.x;
  put_block(sum, reinterpret_cast<float*>(memory), threadIdx.x, lanes,
            threadIdx.z * blockDim.y + threadIdx.y, blockDim.y * blockDim.z,
            min(lanes * V, params.channels - at.first_channel),
            BlockSums<T>(reduction, blockIdx.x, at.first_channel));
}

}  // namespace

template <typename T>
bool nhwc_stream(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    using M = StreamShape<Axis>;
    if constexpr (Axis::inputs(1) <= Axis::kTaps) {  // unless dilated: few taps meet a row
      const auto plan = plan_stream<Axis, M, T>(c.g.n, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w,
                                                c.padding_h, c.padding_w, {c.in.data, c.out.data});
      if (plan.aligned && c.g.c >= kMinChannels) {
        constexpr size_t kFilters = sizeof(float) * M::kTaps * M::kTaps * kMaxLanes * M::kChannels;
        c.launch(nhwc_stream_kernel<Axis, T>, plan.grid, plan.block,
                 kFilters + StreamReader<Axis, T>::kBytes, plan.params, c.flip, c.in.data, c.weight,
                 c.bias, c.out.data);
        return true;
      }
    }
    return false;
  });
}

namespace {

// V channels a thread; false where their positions are not aligned.
template <typename Axis, int V, typename T>
bool launch_stream_weight_gradient(const WeightGradient<T>& c) {
  using M = WeightStreamShape<Axis, V>;
  const DepthwiseGeometry& g = c.g;
  const auto plan = plan_stream<Axis, M, T>(g.n, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h,
                                            g.padding_w, {c.x, c.grad});
  if (!plan.aligned) {
    return false;
  }
  const size_t sums = sizeof(float) * reduction_elements(plan.block.x, plan.block.y * plan.block.z,
                                                         (M::kTaps * M::kTaps + 1) * V);
  two_stage_reduction(c, plan.grid.x, [&](const WeightReduction<T>& reduction) {
    launch_kernel(nhwc_stream_weight_gradient_kernel<M, T>, plan.grid, plan.block,
                  std::max(WeightReaders<M, T>::kBytes, sums), c.stream, plan.params, c.x, c.grad,
                  reduction);
  });
  return true;
}

}  // namespace

template <typename T>
bool nhwc_stream_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_direct(c.g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps == 7) {
      return launch_stream_weight_gradient<Axis, 1>(c);
    } else if constexpr (Axis::kTaps == 5) {
      // One channel is always aligned; with stride 2 direct_l1_weight_gradient is faster than that.
      return launch_stream_weight_gradient<Axis, 2>(c) ||
             (Axis::step(1) == 1 && launch_stream_weight_gradient<Axis, 1>(c));
    } else {
      // Images a few column tiles wide are too short a stream to be worth many channels a thread.
      if constexpr (WeightStreamShape<Axis, 2>::kLight) {
        constexpr int kNarrow = 14;  // positions
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
