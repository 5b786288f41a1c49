// nchw_fma: NCHW, register tiles, FMAs in float32.
//
//      ring buffer in shared memory              register tile
//      ┌────────────┬──────────┬──────────┐      ┌─────────────┐
//      │ stage i    │ stage i+1│ stage i+2│      │ kRows×kCols │
//      │ input rows │ (bulk copy in flight)│ ──► │ sums        │ ──► stage i ──► bulk copy out
//      └────────────┴──────────┴──────────┘      └─────────────┘
//
//   block:   every gridDim.x-th stage: adjacent feature maps (one channel of one image each), or a
//            band of rows of one
//   shared:  a ring buffer of kStages stages, filled by bulk copies; outputs overwrite the inputs
//   thread:  a register tile of 4 to 7 rows × 7 or 14 columns of one feature map
//
// Weight gradient
//   block:   a range of channels (or a band of one), of every gridDim.y-th image
//   shared:  a ring buffer of two stages: inputs and grad_output; at the end the sums
//   thread:  one sum per tap over the same tile of all images; stage 1 of a two-stage reduction
#pragma once

#include <cuda_fp16.h>

#include "depthwise_conv2d/cuda/planes/nchw_stage.cuh"
#include "depthwise_conv2d/cuda/taps.cuh"

namespace ops::cuda {

// Tile sizes. 7 columns: an odd stride avoids bank conflicts, and 7 divides the usual widths 7, 14,
// 28, 56, 112, 224.
template <typename Axis>
struct FmaShape {
  static constexpr bool kTransposed = Axis::kTransposed;
  static constexpr int kRows = Axis::kTaps == 7     ? 4  // limited by registers
                               : kTransposed        ? (Axis::kTaps == 3 ? 6 : 4)
                               : Axis::kStride == 2 ? 5
                                                    : 7;
  static constexpr int kCols = kTransposed ? 14 : 7;
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  static constexpr int kThreads = 1;  // per tile
  static constexpr int kMaps = 1;
  static constexpr int kThreadsPerSm = 512;
  static constexpr int kThreadsPerBlock = 128;  // preferred
};

// A thread's tile within every stage: its map and first output.
template <typename Axis>
struct FmaPosition {
  int map, row, col;

  // Shift successive rows of tiles to the left by up to spare_cols, against bank conflicts between
  // threads with tiles below each other.
  __device__ explicit FmaPosition(const NchwParams& params) {
    using Shape = FmaShape<Axis>;
    constexpr int kStep = Shape::kTransposed ? 2 : 1;
    const int line = threadIdx.x / params.tiles_w;
    map = line / params.tiles_h;
    row = line % params.tiles_h * Shape::kRows;
    col = threadIdx.x % params.tiles_w * Shape::kCols -
          line % (params.spare_cols / kStep + 1) * kStep;
  }
};

// Conversion to float32 that zeroes elements outside the image: one integer instruction.
template <typename T>
struct Mask;

template <>
struct Mask<float> {
  static constexpr unsigned kKeep = ~0u;
  static __device__ float apply(float x, unsigned mask) {
    return __uint_as_float(__float_as_uint(x) & mask);
  }
};

template <>
struct Mask<BFloat16> {
  static constexpr unsigned kKeep = 1u << 16;  // bfloat16 is the upper half of a float32
  static __device__ float apply(BFloat16 x, unsigned mask) { return __uint_as_float(x.x * mask); }
};

template <>
struct Mask<Half> {
  static constexpr unsigned kKeep = 0xffff;
  static __device__ float apply(Half x, unsigned mask) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(x.x & mask)));
  }
};

// Masks of kCount columns from `first` on: zero outside the image.
template <typename T, int kCount>
struct ColumnMasks {
  unsigned mask[kCount];

  __device__ ColumnMasks(int first, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      mask[i] = is_inside(first + i, width) ? Mask<T>::kKeep : 0;
    }
  }

  __device__ void load(const T* from, float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = Mask<T>::apply(from[i], mask[i]);
    }
  }
};

// A channel's filter and bias in registers.
template <int kTaps, typename T>
struct Filter {
  float tap[kTaps];
  float bias;

  __device__ void load(const T* __restrict__ weight, const T* __restrict__ bias_data, int channel,
                       bool flip) {
    weight += channel * kTaps;
    float given[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      given[i] = static_cast<float>(weight[i]);
    }
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      tap[i] = flip ? given[kTaps - 1 - i] : given[i];
    }
    bias = bias_data ? static_cast<float>(bias_data[channel]) : 0.0f;
  }
};

// Input window of a tile in shared memory.
template <typename Axis, typename T>
class FmaWindow {
  using Shape = FmaShape<Axis>;

 public:
  __device__ FmaWindow(const NchwParams& params, const FmaPosition<Axis>& at)
      : col_(params.start_w + Axis::step(at.col)), inside_(col_, params.in_w) {}

  // Call multiply(q, j, tap, x) for each tap of each output (q, j) of the tile; x is the input that
  // the tap reads. Offsets into `shared` are in elements.
  template <typename F>
  __device__ __forceinline__ void multiply_taps(const NchwParams& params,
                                                const FmaPosition<Axis>& at, const T* shared,
                                                int zeros, int in_offset, const Stage& stage,
                                                const F& multiply) const {
    const int y = params.start_h + Axis::step(stage.out_row + at.row);
    const int window = in_offset + (at.map * stage.in_rows + y - stage.in_row) * params.in_w + col_;
#pragma unroll
    for (int r = 0; r < Shape::kInRows; ++r) {
      float x[Shape::kInCols];
      const bool within = params.has_in_row(y + r);
      inside_.load(shared + (within ? window + r * params.in_w : zeros), x);
      for_each_tap<Axis, Axis, Shape::kRows, Shape::kCols, Shape::kInCols>(
          r, [&](int q, int j, int tap, int i) { multiply(q, j, tap, x[i]); });
    }
  }

 private:
  int col_;
  ColumnMasks<T, Shape::kInCols> inside_;
};

// Forward pass or input gradient of one tile.
template <typename TileAxis, typename Element>
class FmaTile {
 public:
  using Axis = TileAxis;
  using T = Element;
  using Shape = FmaShape<Axis>;

  __device__ explicit FmaTile(const NchwParams& params)
      : params_(params), at_(params), window_(params, at_) {}

  __device__ int map() const { return at_.map; }  // of a stage
  __device__ void load_filter(const T* weight, const T* bias, int channel, bool flip) {
    filter_.load(weight, bias, channel, flip);
  }

  // Compute the tile from the stage's inputs at shared[in_offset] and zeros at shared[zeros].
  __device__ void convolve(const T* shared, int zeros, int in_offset, const Stage& stage) {
#pragma unroll
    for (int q = 0; q < Shape::kRows; ++q) {
#pragma unroll
      for (int j = 0; j < Shape::kCols; ++j) {
        sum_[q][j] = filter_.bias;
      }
    }
    window_.multiply_taps(
        params_, at_, shared, zeros, in_offset, stage,
        [&](int q, int j, int tap, float x) { sum_[q][j] += filter_.tap[tap] * x; });
  }

  // Store the tile to the stage's outputs in shared memory.
  __device__ void store(T* outputs, const Stage& stage) const {
    T* to = outputs + (at_.map * stage.out_rows + at_.row) * params_.out_w + at_.col;
    const int rows = stage.out_rows - at_.row, cols = params_.out_w - at_.col;
    if (rows >= Shape::kRows && cols >= Shape::kCols && at_.col >= 0) {
#pragma unroll
      for (int q = 0; q < Shape::kRows; ++q, to += params_.out_w) {
#pragma unroll
        for (int j = 0; j < Shape::kCols; ++j) {
          to[j] = static_cast<T>(sum_[q][j]);
        }
      }
    } else {
#pragma unroll
      for (int q = 0; q < Shape::kRows; ++q, to += params_.out_w) {
#pragma unroll
        for (int j = 0; j < Shape::kCols; ++j) {
          if (q < rows && j < cols && at_.col + j >= 0) {
            to[j] = static_cast<T>(sum_[q][j]);
          }
        }
      }
    }
  }

 private:
  const NchwParams& params_;
  FmaPosition<Axis> at_;
  FmaWindow<Axis, T> window_;
  Filter<Shape::kTaps, T> filter_;
  float sum_[Shape::kRows][Shape::kCols];
};

// Sums of one tile for the gradients of a filter and its bias.
template <typename TileAxis, typename Element>
class FmaWeightGradientTile {
 public:
  using Axis = TileAxis;
  using T = Element;
  using Shape = FmaShape<Axis>;
  static constexpr int kTaps = Shape::kTaps;

  static size_t shared_floats(int threads) {
    return static_cast<size_t>(kTaps + 1) * (threads + kPad);
  }

  __device__ explicit FmaWeightGradientTile(const NchwParams& params)
      : params_(params), at_(params), window_(params, at_), grad_inside_(at_.col, params.out_w) {}

  __device__ int map() const { return at_.map; }

  // Accumulate a stage: inputs at shared[in_offset], grad_output at shared[grad_offset].
  __device__ void add(const T* shared, int zeros, int in_offset, int grad_offset,
                      const Stage& stage) {
    float g[Shape::kRows][Shape::kCols];
    grad_offset += (at_.map * stage.out_rows + at_.row) * params_.out_w + at_.col;
#pragma unroll
    for (int q = 0; q < Shape::kRows; ++q) {
      grad_inside_.load(
          shared + (at_.row + q < stage.out_rows ? grad_offset + q * params_.out_w : zeros), g[q]);
#pragma unroll
      for (int j = 0; j < Shape::kCols; ++j) {
        sum_[kTaps] += g[q][j];
      }
    }
    window_.multiply_taps(params_, at_, shared, zeros, in_offset, stage,
                          [&](int q, int j, int tap, float x) { sum_[tap] += g[q][j] * x; });
  }

  // Reduce the sums over the tiles of each of `channels` maps: call put(i, sum).
  template <typename Put>
  __device__ void reduce(float* shared, int channels, const Put& put) const {
    const int pitch = blockDim.x + kPad;
#pragma unroll
    for (int i = 0; i <= kTaps; ++i) {
      shared[i * pitch + threadIdx.x] = sum_[i];
    }
    __syncthreads();
    const int tiles = params_.tiles_w * params_.tiles_h;
    reduce_lanes(channels * (kTaps + 1), put, [&](int i, int lane) {
      const float* tile = shared + i % (kTaps + 1) * pitch + i / (kTaps + 1) * tiles;
      float sum = 0;
      for (int t = lane; t < tiles; t += kReduceLanes) {
        sum += tile[t];
      }
      return sum;
    });
  }

 private:
  static constexpr int kPad = kReduceLanes;  // padding against bank conflicts

  const NchwParams& params_;
  FmaPosition<Axis> at_;
  FmaWindow<Axis, T> window_;
  ColumnMasks<T, Shape::kCols> grad_inside_;
  float sum_[kTaps + 1] = {};
};

}  // namespace ops::cuda
