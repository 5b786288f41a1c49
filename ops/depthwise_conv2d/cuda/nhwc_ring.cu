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
//   thread:  4 to 8 columns of 2 channels; adds each input row to all pending output rows
#include "depthwise_conv2d/cuda/nhwc_ring.cuh"

namespace ops::cuda {
namespace {

constexpr int kMinChannels = 8;  // fewer use too little of each memory transaction

// Columns per thread and threads per block that fill the registers without spills.
template <typename Axis>
constexpr int kForwardCols = !Axis::kTransposed ? 7 : (Axis::kTaps == 3 ? 8 : 4);
template <typename Axis>  // 5×5 with stride 1, 7×7
constexpr bool kManySums =
    Axis::kTaps == 7 || (Axis::kTaps == 5 && !Axis::kTransposed && Axis::step(1) == 1);
template <typename Axis, typename T>
using ForwardShape =
    RingShape<Axis, 2, kForwardCols<Axis>, kRingDepth<Axis, T>, kManySums<Axis> ? 192 : 256>;

// The filters of a thread's V channels in float32: in registers (3×3), or in shared memory,
// [row][lane][column][channel].
template <typename Shape>
struct RingTaps {
  static constexpr int kTaps = Shape::kTaps, V = Shape::kChannels;
  static constexpr bool kRegisters = kTaps == 3;
  // An odd number of 16-byte vectors per lane: no bank conflicts.
  static constexpr int kVectors = (kTaps * V * sizeof(float) + kVectorBytes - 1) / kVectorBytes;
  static constexpr int kStride = (kVectors | 1) * 4;                               // floats
  static constexpr int kBytes = kRegisters ? 0 : kTaps * kStride * sizeof(float);  // per lane

  float taps[kRegisters ? kTaps * kTaps * V : 1];
  float* shared;   // the thread's row 0
  int row_stride;  // floats

  // tap_of(k, v): tap k of the thread's channel v.
  template <typename F>
  __device__ RingTaps(float* memory, const F& tap_of)
      : shared(memory + threadIdx.x * kStride), row_stride(blockDim.x * kStride) {
    if constexpr (kRegisters) {
#pragma unroll
      for (int i = 0; i < kTaps * kTaps * V; ++i) {
        taps[i] = tap_of(i / V, i % V);
      }
    } else {
      for (int i = threadIdx.y; i < kTaps * kTaps * V; i += blockDim.y) {
        const int k = i / V;
        shared[k / kTaps * row_stride + k % kTaps * V + i % V] = tap_of(k, i % V);
      }
    }
  }
  // Read row a of the filters.
  __device__ void read(int a, float (&row)[kVectors * 4]) const {
    if constexpr (kRegisters) {
#pragma unroll
      for (int i = 0; i < kTaps * V; ++i) {
        row[i] = taps[a * kTaps * V + i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        reinterpret_cast<float4&>(row[i * 4]) =
            *reinterpret_cast<const float4*>(shared + a * row_stride + i * 4);
      }
    }
  }
};

// Return the address of pixel j of a row, with one integer multiply-add.
template <typename T>
__device__ T* pixel(T* row, unsigned channels, unsigned j) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(row) +
                              static_cast<uint64_t>(channels) * (j * sizeof(T)));
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    nhwc_ring_kernel(RingParams params, bool flip, const T* __restrict__ in,
                     const T* __restrict__ weight, const T* __restrict__ bias,
                     T* __restrict__ out) {
  using Axis = typename Shape::Axis;
  using Taps = RingTaps<Shape>;
  constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  constexpr int kTaps = Shape::kTaps, kPending = Shape::kPending, kStepOut = Shape::kStepOut;
  extern __shared__ __align__(16) unsigned char memory[];
  const int pitch = blockDim.x * V, pitch_bytes = pitch * static_cast<int>(sizeof(T));
  const int chunk = blockIdx.x % params.chunks, tile = blockIdx.x / params.chunks;
  const int first_channel = chunk * pitch, channel = first_channel + threadIdx.x * V;
  const int w0 = (tile * blockDim.y + threadIdx.y) * kCols;  // the thread's first output column
  const bool has_channel = channel < params.channels;
  const int cols = has_channel ? min(kCols, params.out_w - w0) : 0;
  clear_shared(memory, params.ring_bytes);

  const int row_bytes = params.in_cols * pitch_bytes, stage = Shape::kStepIn * row_bytes;
  RowCopy<T> rows(in, params.in_h, params.in_w,
                  params.start_w + Axis::step(tile * blockDim.y * kCols), params.in_cols,
                  first_channel, pitch, params);
  RingCursor<Shape> now(params, blockIdx.y * params.share), ahead = now;
  rows.seek(ahead.image, ahead.in_row());
  // Start the copies of the next step to the stage at byte `to`. Commit a group even without
  // copies: wait_for_copies counts one per step.
  const auto fetch = [&](int to) {
    if (ahead.valid()) {
      const int y = ahead.in_row();
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        rows.copy(ahead.is_input_row(y + r), memory + to + r * row_bytes);
      }
      if (ahead.next()) {
        rows.seek(ahead.image, ahead.in_row());
      }
    }
    commit_copies();
  };
  for (int i = 0; i < Shape::kDepth; ++i) {
    fetch(i * stage);
  }

  const Taps taps(reinterpret_cast<float*>(memory + params.ring_bytes), [&](int k, int v) {
    const int from = flip ? kTaps * kTaps - 1 - k : k;
    return has_channel ? static_cast<float>(weight[(channel + v) * kTaps * kTaps + from]) : 0.0f;
  });
  float initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias && has_channel ? static_cast<float>(bias[channel + v]) : 0.0f;
  }

  using Row = Pixels<T, kInCols, V>;
  const unsigned char* mine =
      memory + Axis::step(threadIdx.y * kCols) * pitch_bytes + threadIdx.x * V * sizeof(T);
  const int zero_row = (Shape::kDepth + 1) * stage;  // byte offset; follows the last stage
  int from = 0, to = Shape::kDepth * stage;  // byte offsets of the stages to read and to fill
  unsigned channels;                         // the asm keeps it in a register
  asm("mov.u32 %0, %1;" : "=r"(channels) : "r"(params.channels));
  const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
  // Return the thread's first output of the current step (during the warm-up before the image).
  const auto output = [&] {
    return out + (static_cast<int64_t>(now.image) * params.out_h + now.step * kStepOut) * out_row +
           static_cast<int64_t>(w0) * params.channels + channel;
  };
  T* result = output();
  float sum[Shape::kRegisterRows][kCols][V] = {};
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
        return Row(mine + (now.is_input_row(y + r) ? from + r * row_bytes : zero_row), pitch_bytes);
      };
      const Row first_row = row_at(0);  // before fetch, to overlap the latency of both
      fetch(to);
      // The newest pending rows start with the bias. Sums of an earlier image in their registers
      // are dropped: warm-up steps store nothing, and after them all pending rows are of this
      // image.
#pragma unroll
      for (int i = 0; i < kStepOut * kCols * V; ++i) {
        const int m = kPending - kStepOut + i / (kCols * V);
        sum[Shape::row(u, m)][i / V % kCols][i % V] = initial[i % V];
      }
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        float x[kInCols][V];
        (r == 0 ? first_row : row_at(r)).to_float(x);
#pragma unroll
        for (int m = 0; m < kPending; ++m) {
          const int a = Shape::tap(m, r);
          if (a < 0 || (Shape::kSkipsRows && !now.computes(m))) {
            continue;
          }
          float row[Taps::kVectors * 4];
          taps.read(a, row);
#pragma unroll
          for (int b = 0; b < kTaps; ++b) {  // consecutive multiply-adds are independent
#pragma unroll
            for (int i = 0; i < kInCols; ++i) {
#pragma unroll
              for (int j = 0; j < kCols; ++j) {
                if (Axis::tap(j, i) == b) {
#pragma unroll
                  for (int v = 0; v < V; ++v) {
                    sum[Shape::row(u, m)][j][v] += row[b * V + v] * x[i][v];
                  }
                }
              }
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kStepOut; ++m) {
        const bool stores = now.step >= now.first && now.step * kStepOut + m < params.out_h;
        const int stored = stores ? cols : 0;
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (j < stored) {
            store_vector(pixel(result, channels, j), sum[Shape::row(u, m)][j]);
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
    Shape::end_period(sum);
  }
}

}  // namespace

template <typename T>
bool nhwc_ring(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    constexpr bool kDilated = Axis::inputs(1) > Axis::kTaps;
    if (c.g.c < kMinChannels) {
      return false;
    }
    // nhwc_stream runs 7×7 with stride 1, direct_l1 dilation 2.
    if constexpr (!kDilated && !std::is_same_v<Axis, Direct<7, 1, 1>>) {
      using Shape = ForwardShape<Axis, T>;
      const auto plan =
          plan_ring<Shape, 0, T>(c.g.n, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h,
                                 c.padding_w, RingTaps<Shape>::kBytes, {c.in.data, c.out.data});
      if (plan.fits) {
        c.launch(nhwc_ring_kernel<Shape, T>, plan.grid, plan.block, plan.shared, plan.params,
                 c.flip, c.in.data, c.weight, c.bias, c.out.data);
        return true;
      }
    }
    return false;
  });
}

template bool nhwc_ring(const Convolution<float>&);
template bool nhwc_ring(const Convolution<Half>&);
template bool nhwc_ring(const Convolution<BFloat16>&);

}  // namespace ops::cuda
