// Kernel of nhwc_ring, with or without the weight gradient; figures in nhwc_ring.cu and
// nhwc_ring_all_gradients.cu.
#pragma once

#include "depthwise_conv2d/cuda/pixels/nhwc_ring_copy.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {

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

// Convolve `in` (forward pass, input gradient). With kWeightGradient, `in` is grad_output, `out` is
// grad_input, and the weight gradient is added up as well. A row of x stays in registers as long as
// the row of grad_input at the same position is pending; for each tap, a pixel of grad_output is
// multiplied by the weight (for grad_input) and by the pixel of x (for the weight gradient).
template <typename Shape, typename T, bool kWeightGradient>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    nhwc_ring_kernel(RingParams params, bool flip, const T* __restrict__ in,
                     const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out,
                     const T* __restrict__ x, WeightReduction<T> reduction) {
  using Axis = typename Shape::Axis;
  using Taps = RingTaps<Shape>;
  constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  constexpr int kTaps = Shape::kTaps, kPending = Shape::kPending, kStepOut = Shape::kStepOut;
  extern __shared__ __align__(16) unsigned char memory[];
  const int block_channels = blockDim.x * V, pitch_bytes = params.pitch_bytes;
  const int chunk = blockIdx.x % params.chunks, tile = blockIdx.x / params.chunks;
  const int first_channel = chunk * block_channels, channel = first_channel + threadIdx.x * V;
  const int w0 = (tile * blockDim.y + threadIdx.y) * kCols;  // the thread's first output column
  const bool has_channel = channel < params.channels;
  const int cols = has_channel ? min(kCols, params.out_w - w0) : 0;
  clear_shared(memory, params.ring_bytes);

  // A stage: kStepIn input rows, and with kWeightGradient kStepOut rows of x.
  const int row_bytes = params.in_cols * pitch_bytes, tile_cols = blockDim.y * kCols;
  const int x_at = Shape::kStepIn * row_bytes, x_bytes = tile_cols * pitch_bytes;
  const int stage = x_at + (kWeightGradient ? kStepOut * x_bytes : 0);
  constexpr bool kShifts = Shape::template kShifts<T>;
  const int first_col = params.start_w + Axis::step(tile * tile_cols);
  RowCopy<T, kShifts> rows(in, params.in_h, params.in_w, first_col, params.in_cols, first_channel,
                           params);
  RowCopy<T, kShifts> xs(x, params.out_h, params.out_w, tile * tile_cols, tile_cols, first_channel,
                         params);
  RingCursor<Shape> now(params, blockIdx.y * params.share), ahead = now;
  // newest: row of x at which the kStepOut rows begin that become pending in step `at`. has_x:
  // whether the block completes row newest + m, which is never before its part of the image. Zeros
  // replace x in other rows, so that they add nothing to the weight gradient.
  const auto newest = [](const RingCursor<Shape>& at) {
    return (at.step + Shape::kWarmUp) * kStepOut;
  };
  const auto has_x = [&](const RingCursor<Shape>& at, int m) {
    return at.step + Shape::kWarmUp < at.last && newest(at) + m < params.out_h;
  };
  const auto seek = [&] {
    rows.seek(ahead.image, ahead.in_row());
    if constexpr (kWeightGradient) {
      xs.seek(ahead.image, newest(ahead));
    }
  };
  seek();
  // Start the copies of the next step to the stage at byte `to`. Commit a group even without
  // copies: wait_for_copies counts one per step.
  const auto fetch = [&](int to) {
    if (ahead.valid()) {
      const int y = ahead.in_row();
#pragma unroll
      for (int r = 0; r < Shape::kStepIn; ++r) {
        rows.copy(ahead.is_input_row(y + r), memory + to + r * row_bytes);
      }
#pragma unroll
      for (int m = 0; kWeightGradient && m < kStepOut; ++m) {
        xs.copy(has_x(ahead, m), memory + to + x_at + m * x_bytes);
      }
      if (ahead.next()) {
        seek();
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
  const unsigned char* lane = memory + threadIdx.x * V * sizeof(T);
  const unsigned char* mine = lane + Axis::step(threadIdx.y * kCols) * pitch_bytes;
  const unsigned char* my_x = lane + threadIdx.y * kCols * pitch_bytes;
  const PixelShift<kShifts> shift(in, params.in_h, params.in_w,
                                  first_col + Axis::step(threadIdx.y * kCols), first_channel,
                                  params);
  const PixelShift<kShifts> x_shift(x, params.out_h, params.out_w, w0, first_channel, params);
  const int zero_row = (Shape::kDepth + 1) * stage;  // byte offset; follows the last stage
  int from = 0, to = Shape::kDepth * stage;  // byte offsets of the stages to read and to fill
  unsigned channels;                         // the asm keeps it in a register
  asm("mov.u32 %0, %1;" : "=r"(channels) : "r"(params.channels));
  const int64_t out_row = static_cast<int64_t>(params.out_w) * params.channels;
  // Return the thread's first output of the current step (in the warm-up it may lie before the
  // image; nothing is stored).
  const auto output = [&] {
    return out + (static_cast<int64_t>(now.image) * params.out_h + now.step * kStepOut) * out_row +
           static_cast<int64_t>(w0) * params.channels + channel;
  };
  T* result = output();
  float sum[Shape::kRegisterRows][kCols][V] = {};
  constexpr int kSums = kTaps * kTaps + 1;  // taps, then the bias
  float weight_sum[kWeightGradient ? kSums : 1][V] = {};
  float pending_x[kWeightGradient ? Shape::kRegisterRows : 1][kCols][V] = {};
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
        return Row(mine + (now.is_input_row(y + r) ? from + r * row_bytes : zero_row), pitch_bytes,
                   shift.at(now.image, y + r), shift.next());
      };
      const Row first_row = row_at(0);  // before fetch, to overlap the latency of both
#pragma unroll
      for (int m = 0; kWeightGradient && m < kStepOut; ++m) {
        Pixels<T, kCols, V>(my_x + (has_x(now, m) ? from + x_at + m * x_bytes : zero_row),
                            pitch_bytes, x_shift.at(now.image, newest(now) + m), x_shift.next())
            .to_float(pending_x[Shape::row(u, kPending - kStepOut + m)]);
      }
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
        if (Shape::kSkipsRows && !now.is_input_row(y + r)) {
          continue;
        }
        float pixels[kInCols][V];
        (r == 0 ? first_row : row_at(r)).to_float(pixels);
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
                    sum[Shape::row(u, m)][j][v] += row[b * V + v] * pixels[i][v];
                    if constexpr (kWeightGradient) {
                      weight_sum[a * kTaps + b][v] +=
                          pending_x[Shape::row(u, m)][j][v] * pixels[i][v];
                      // bias gradient: each pixel once, where it meets the filter's centre
                      if (a == kTaps / 2 && b == kTaps / 2 && now.computes(m)) {
                        weight_sum[kSums - 1][v] += pixels[i][v];
                      }
                    }
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
    if constexpr (kWeightGradient) {
      Shape::end_period(pending_x);
    }
  }
  if constexpr (kWeightGradient) {
    float ordered[kSums][V];  // the filter is flipped unless the axis is transposed
#pragma unroll
    for (int i = 0; i < kSums * V; ++i) {
      const int k = i / V;
      const bool reverse = !Axis::kTransposed && k < kSums - 1;
      ordered[k][i % V] = weight_sum[reverse ? kSums - 2 - k : k][i % V];
    }
    wait_for_copies<0>();
    __syncthreads();
    reduce_and_put(ordered, reinterpret_cast<float*>(memory), threadIdx.x, blockDim.x, threadIdx.y,
                   blockDim.y, min(block_channels, params.channels - first_channel),
                   BlockSums<T>(reduction, tile * gridDim.y + blockIdx.y, first_channel));
  }
}

}  // namespace ops::cuda
