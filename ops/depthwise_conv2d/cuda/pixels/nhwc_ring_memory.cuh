// Memory of nhwc_ring: rows of tensors in stages in shared memory, the zero row after them, and
// filters; accumulators in registers.
#pragma once

#include "core/cuda/copy.cuh"
#include "depthwise_conv2d/cuda/pixels/nhwc_ring.cuh"

namespace ops::depthwise_conv2d {

// kCols pixels of V channels, as read from shared memory.
template <typename T, int kCols, int V>
struct Pixels {
  using Bits = typename BitsOf<V * sizeof(T)>::type;
  Bits bits[kCols];

  __device__ void to_float(float (&x)[kCols][V]) const { widen<T>(bits, x); }
};

// Rows of a tensor in shared memory, [column][channel]. The block copies them asynchronously (from
// compute capability 8.0), a thread reads kCols pixels of V channels.
//
// `copies_per_pixel` adjacent threads copy a pixel, `pixels` pixels at a time. Columns outside the
// image are never written and keep their first zeros, as do channels beyond the last unless
// pixels are shifted. Rows outside the image are not copied: their stage keeps an old row, in whose
// place threads read the zero row.
//
// Shift: 16-bit pixels may begin at half a 4-byte word: every second one if the number of channels
// is odd, all if the tensor is misaligned. Words are copied whole, so that a copy may begin with
// the element before the block's first channel. Words at both ends may reach 2 bytes beyond the
// tensor, but not beyond its allocation. Copies derive the shift from addresses, reads from
// parities.
//
// kPolicy: loads have the L2 policy of params.streaming.
template <typename T, int kCols, int V, bool kPolicy>
class RingRows {
  using Row = Pixels<T, kCols, V>;

 public:
  // The block has columns [first_col, first_col + cols) and the channels from first_channel on, the
  // thread the columns from thread_col on.
  __device__ RingRows(const T* images, int height, int width, int first_col, int cols,
                      int thread_col, int first_channel, const RingParams& params,
                      unsigned char* memory)
      : memory_(memory),
        pitch_bytes_(params.pitch_bytes),
        height_(height),
        row_bytes_(static_cast<int64_t>(width) * params.channels * sizeof(T)),
        policy_(kPolicy ? l2_policy(params.streaming) : 0),
        wide_(params.copy_bytes == kVectorBytes),
        pixels_(memory + threadIdx.x * V * sizeof(T) + thread_col * params.pitch_bytes),
        odd_(kShifts && params.shifted ? params.channels & 1 : 0),
        odd_row_(width & odd_),
        odd_image_(height & odd_row_),
        odd_first_(0) {
    constexpr int kSize = sizeof(T);
    const int copies_per_pixel = params.pitch_bytes / params.copy_bytes;
    const int thread = flat_thread();
    const int pixels = static_cast<int>(blockDim.x * blockDim.y) / copies_per_pixel;
    const int first_pixel = thread / copies_per_pixel;
    const int at = thread % copies_per_pixel * params.copy_bytes;  // within the pixel
    left_ = (params.channels - first_channel) * kSize - at;
    const int begin = max(0, -first_col), end = min(cols, width - first_col);
    // the thread's first column inside the image
    const int col = first_pixel + (max(begin - first_pixel, 0) + pixels - 1) / pixels * pixels;
    const bool active = first_pixel < pixels && left_ + (params.shifted ? 2 : 0) > 0 && col < end;
    copies_ = active ? (end - col + pixels - 1) / pixels : 0;
    first_ = reinterpret_cast<const char*>(
                 images + static_cast<int64_t>(first_col + col) * params.channels + first_channel) +
             at;
    from_step_ = static_cast<int64_t>(pixels) * params.channels * kSize;
    to_ = col * params.pitch_bytes + at;
    to_step_ = pixels * params.pitch_bytes;
    if (kShifts && params.shifted) {
      const int element = static_cast<int>(reinterpret_cast<uintptr_t>(images) / 2);
      odd_first_ = (element + first_channel + ((first_col + thread_col) & odd_)) & 1;
    }
  }

  // Copy row y of an image next; y may be outside of it.
  __device__ void seek(int image, int y) {
    from_ = first_ + (static_cast<int64_t>(image) * height_ + y) * row_bytes_;
  }
  // Start to copy the row to byte `at` of shared memory if it is `inside` the image, then advance
  // to the next row.
  __device__ void copy(int at, bool inside) {
    if (inside) {
      const unsigned to = shared_address(memory_ + at) + to_;
      wide_ ? copy_units<16>(to) : copy_units<4>(to);
    }
    from_ += row_bytes_;
  }
  // Read row y of an image, which is at byte `at`.
  __device__ Row read(int at, int image, int y) const {
    const int shift = kShifts ? (odd_first_ ^ (odd_image_ & image) ^ (odd_row_ & y)) * 2 : 0;
    const int next = kShifts ? odd_ * 2 : 0;  // XOR of the shifts of two adjacent columns
    const unsigned char* const pixels[] = {pixels_ + at + shift, pixels_ + at + (shift ^ next)};
    Row row;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      row.bits[i] = *reinterpret_cast<const typename Row::Bits*>(pixels[i % 2] + i * pitch_bytes_);
    }
    return row;
  }

 private:
  static constexpr bool kShifts = V * sizeof(T) == 2;  // pixels of 16 bits

  unsigned char* memory_;
  int pitch_bytes_;
  const char *first_, *from_;   // of the first row, of the next row
  int height_, copies_, left_;  // left_: bytes from the thread's copy to the last channel
  int64_t row_bytes_, from_step_;
  uint64_t policy_;
  unsigned to_, to_step_;
  bool wide_;
  const unsigned char* pixels_;                // of the thread in a row at byte 0
  int odd_, odd_row_, odd_image_, odd_first_;  // parities: of a pixel, a row, an image, and of the
                                               // first pixel's index

  template <int kBytes>
  __device__ void copy_units(unsigned to) const {
    const char* from = from_;
#pragma unroll 1
    for (int left = copies_; left > 0; --left, from += from_step_, to += to_step_) {
      const char* unit = from;
      if constexpr (kShifts && kBytes == 4) {
        const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from)) & 2;
        if (left_ + shift <= 0) {  // the shift needs no further word
          continue;
        }
        unit -= shift;
      }
      if constexpr (kPolicy) {
        copy_async<kBytes>(to, unit, policy_);
      } else {
        copy_async<kBytes>(to, unit);
      }
    }
  }
};

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
  __device__ void load(float* memory, const F& tap_of) {
    shared = memory + threadIdx.x * kStride, row_stride = blockDim.x * kStride;
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

// Convolutions add input × taps to the pending output rows. Weight gradients add input × factor to
// a sum per tap: the factor is grad_output if the input is x, and x if the input is grad_output
// (all gradients; the outputs are grad_input).
enum class RingPass { kConvolution, kWeightGradient, kAllGradients };

// Accumulators of a thread. A row of the factor stays in registers as long as the output row at the
// same position is pending.
template <typename Shape, RingPass kPass>
struct RingSums {
  using Axis = typename Shape::Axis;
  using Taps = RingTaps<Shape>;
  static constexpr bool kConvolves = kPass != RingPass::kWeightGradient;
  static constexpr bool kWeightGradient = kPass != RingPass::kConvolution;
  static constexpr int kFactorRows = kWeightGradient ? Shape::kStepOut : 0;  // per step
  static constexpr int V = Shape::kChannels, kCols = Shape::kCols, kInCols = Shape::kInCols;
  static constexpr int kTaps = Shape::kTaps;
  static constexpr int kSums = kTaps * kTaps + 1;  // taps, then the bias
  // All gradients with stride 1: the outputs are convolved with the flipped filter.
  static constexpr bool kFlipped = kConvolves && !Axis::kTransposed;

  float output[kConvolves ? Shape::kRegisterRows : 1][kCols][V] = {};
  float factor[kWeightGradient ? Shape::kRegisterRows : 1][kCols][V] = {};
  float weight[kWeightGradient ? kSums : 1][V] = {};

  // Begin the newest pending rows, outputs with the bias. Sums of an earlier image in their
  // registers are dropped: warm-up steps store nothing, and after them all pending rows are of this
  // image.
  __device__ void begin(int u, const float (&bias)[V]) {
#pragma unroll
    for (int i = 0; i < Shape::kStepOut * kCols * V; ++i) {
      const int row = Shape::row(u, Shape::kPending - Shape::kStepOut + i / (kCols * V));
      const int j = i / V % kCols, v = i % V;
      if constexpr (kConvolves) {
        output[row][j][v] = bias[v];
      } else {
        weight[kSums - 1][v] += factor[row][j][v];
      }
    }
  }
  // Add input row r of step u of a period.
  __device__ void add(int u, int r, const RingCursor<Shape>& now, const Taps& taps,
                      const float (&pixels)[kInCols][V]) {
#pragma unroll
    for (int m = 0; m < Shape::kPending; ++m) {
      const int a = Shape::tap(m, r);
      if (a < 0 || (Shape::kSkipsRows && !now.computes(m))) {
        continue;
      }
      const int row = Shape::row(u, m);
      float tap_row[Taps::kVectors * 4];
      if constexpr (kConvolves) {
        taps.read(a, tap_row);
      }
      for_each_column_tap<Axis, kCols>([&](int j, int b, int i) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if constexpr (kConvolves) {
            output[row][j][v] += tap_row[b * V + v] * pixels[i][v];
          }
          if constexpr (kWeightGradient) {
            const int k = a * kTaps + b;
            weight[kFlipped ? kTaps * kTaps - 1 - k : k][v] += factor[row][j][v] * pixels[i][v];
          }
          // bias gradient: each pixel once, where it meets the filter's centre
          if constexpr (kConvolves && kWeightGradient) {
            if (a == kTaps / 2 && b == kTaps / 2 && now.computes(m)) {
              weight[kSums - 1][v] += pixels[i][v];
            }
          }
        }
      });
    }
  }
  __device__ void end_period() {
    if constexpr (kConvolves) {
      Shape::end_period(output);
    }
    if constexpr (kWeightGradient) {
      Shape::end_period(factor);
    }
  }
};

}  // namespace ops::depthwise_conv2d
