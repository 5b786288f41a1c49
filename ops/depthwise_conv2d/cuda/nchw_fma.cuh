// nchw_fma: register tiles of contiguous images, fused multiply-adds in float32.
//
//      ring buffer in shared memory              register tile
//      ┌────────────┬──────────┬──────────┐      ┌─────────────┐
//      │ stage i    │ stage i+1│ stage i+2│      │ kRows×kCols │
//      │ input rows │ (bulk copy in flight)│ ──► │ sums        │ ──► stage i ──► bulk copy out
//      └────────────┴──────────┴──────────┘      └─────────────┘
//
//   block:   a range of feature maps (one channel of one image each) or a band of rows of one
//   shared:  a ring buffer of kStages spans, filled by bulk copies; results replace the inputs
//   thread:  a register tile of 4 to 7 rows × 7 or 14 columns of one feature map
//
// Weight gradient: a thread keeps one sum a tap and goes through the same tile of all images; stage
// 1 of a two-stage reduction.
#pragma once

#include <cuda_fp16.h>

#include "depthwise_conv2d/cuda/nchw_stage.cuh"

namespace ops::cuda {

// Odd steps along a row spread the threads of a warp over the banks of shared memory, and 7 divides
// the usual 7, 14, 28, 56, 112, 224.
template <typename Axis>
struct FmaShape {
  static constexpr bool kTransposed = Axis::step(8) == 4;
  static constexpr int kRows = Axis::kTaps == 7     ? 4
                               : kTransposed        ? (Axis::kTaps == 3 ? 6 : 4)
                               : Axis::step(1) == 2 ? 5
                                                    : 7;  // as registers allow
  static constexpr int kCols = kTransposed ? 14 : 7;
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  static constexpr int kThreads = 1;  // of a tile
  static constexpr int kMaps = 1;
  static constexpr int kThreadsPerSm = 512;
  static constexpr int kThreadsPerBlock = 128;  // where a row of tiles is no longer
};

// The tile that a thread computes in every range of maps: its map and first output.
template <typename Axis>
struct FmaPosition {
  int map, row, col;

  // Rows of tiles begin further left, one after the other, where threads of a warp that are below
  // each other would meet in a bank.
  __device__ explicit FmaPosition(const NchwParams& params) {
    using Shape = FmaShape<Axis>;
    constexpr int kStep = Shape::kTransposed ? 2 : 1;
    const int line = threadIdx.x / params.across;
    map = line / params.down;
    row = line % params.down * Shape::kRows;
    col = threadIdx.x % params.across * Shape::kCols - line % (params.shifts / kStep + 1) * kStep;
  }
};

// Elements that may be outside the image are masked on the way to float32, at the price of one
// integer instruction.
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
  static constexpr unsigned kKeep = 1u << 16;  // the upper half of a float32
  static __device__ float apply(BFloat16 x, unsigned mask) { return __uint_as_float(x.x * mask); }
};

template <>
struct Mask<Half> {
  static constexpr unsigned kKeep = 0xffff;
  static __device__ float apply(Half x, unsigned mask) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(x.x & mask)));
  }
};

// Which of kCount columns from `first` on are inside an image.
template <typename T, int kCount>
struct ColumnMasks {
  unsigned mask[kCount];

  __device__ ColumnMasks(int first, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      mask[i] =
          static_cast<unsigned>(first + i) < static_cast<unsigned>(width) ? Mask<T>::kKeep : 0;
    }
  }

  __device__ void load(const T* from, float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = Mask<T>::apply(from[i], mask[i]);
    }
  }
};

// The filter of a channel, and the bias.
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

// The inputs under a tile.
template <typename Axis, typename T>
class FmaWindow {
  using Shape = FmaShape<Axis>;

 public:
  __device__ FmaWindow(const NchwParams& params, const FmaPosition<Axis>& at)
      : col_(params.start_w + Axis::step(at.col)), inside_(col_, params.in_w) {}

  // Calls multiply(q, j, tap, x) for output (q, j) of the tile and each input x that a tap joins.
  template <typename F>
  __device__ __forceinline__ void join(const NchwParams& params, const FmaPosition<Axis>& at,
                                       const T* shared, int zeros, int maps,
                                       const StageRange& range, const F& multiply) const {
    const int y = params.start_h + Axis::step(range.out_row + at.row);
    const int window = maps + (at.map * range.in_rows + y - range.in_row) * params.in_w + col_;
#pragma unroll
    for (int r = 0; r < Shape::kInRows; ++r) {
      float x[Shape::kInCols];
      const bool within = params.has_in_row(y + r);
      inside_.load(shared + (within ? window + r * params.in_w : zeros), x);
      join_row<Axis, Axis, Shape::kRows, Shape::kCols, Shape::kInCols>(
          r, [&](int q, int j, int tap, int i) { multiply(q, j, tap, x[i]); });
    }
  }

 private:
  int col_;
  ColumnMasks<T, Shape::kInCols> inside_;
};

// A tile of the convolution.
template <typename TileAxis, typename Element>
class FmaTile {
 public:
  using Axis = TileAxis;
  using T = Element;
  using Shape = FmaShape<Axis>;

  __device__ explicit FmaTile(const NchwParams& params)
      : params_(params), at_(params), window_(params, at_) {}

  __device__ int map() const { return at_.map; }  // of a range
  __device__ void load_filter(const T* weight, const T* bias, int channel, bool flip) {
    filter_.load(weight, bias, channel, flip);
  }

  // `maps`: where those of the range's inputs lie in `shared`, whose first elements are zeros.
  __device__ void convolve(const T* shared, int zeros, int maps, const StageRange& range) {
#pragma unroll
    for (int q = 0; q < Shape::kRows; ++q) {
#pragma unroll
      for (int j = 0; j < Shape::kCols; ++j) {
        sum_[q][j] = filter_.bias;
      }
    }
    window_.join(params_, at_, shared, zeros, maps, range,
                 [&](int q, int j, int tap, float x) { sum_[q][j] += filter_.tap[tap] * x; });
  }

  // `maps`: where those of the range's outputs lie.
  __device__ void store(T* maps, const StageRange& range) const {
    T* to = maps + (at_.map * range.out_rows + at_.row) * params_.out_w + at_.col;
    const int rows = range.out_rows - at_.row, cols = params_.out_w - at_.col;
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

// A tile's part of the gradients of a filter and its bias.
template <typename SumsAxis, typename Element>
class FmaWeightTile {
 public:
  using Axis = SumsAxis;
  using T = Element;
  using Shape = FmaShape<Axis>;
  static constexpr int kTaps = Shape::kTaps;

  // Floats of shared memory for `total`.
  static size_t floats(int threads) { return static_cast<size_t>(kTaps + 1) * (threads + kSpread); }

  __device__ explicit FmaWeightTile(const NchwParams& params)
      : params_(params), at_(params), window_(params, at_), grad_inside_(at_.col, params.out_w) {}

  __device__ int map() const { return at_.map; }

  // `maps` and `grads`: where those of the range lie in `shared`.
  __device__ void add(const T* shared, int zeros, int maps, int grads, const StageRange& range) {
    float g[Shape::kRows][Shape::kCols];
    grads += (at_.map * range.out_rows + at_.row) * params_.out_w + at_.col;
#pragma unroll
    for (int q = 0; q < Shape::kRows; ++q) {
      grad_inside_.load(shared + (at_.row + q < range.out_rows ? grads + q * params_.out_w : zeros),
                        g[q]);
#pragma unroll
      for (int j = 0; j < Shape::kCols; ++j) {
        sum_[kTaps] += g[q][j];
      }
    }
    window_.join(params_, at_, shared, zeros, maps, range,
                 [&](int q, int j, int tap, float x) { sum_[tap] += g[q][j] * x; });
  }

  // put(i, sum) the sums of all tiles of each of `channels` maps, 8 lanes a sum.
  template <typename Put>
  __device__ void total(float* shared, int channels, const Put& put) const {
    const int pitch = blockDim.x + kSpread;
#pragma unroll
    for (int i = 0; i <= kTaps; ++i) {
      shared[i * pitch + threadIdx.x] = sum_[i];
    }
    __syncthreads();
    const int tiles = params_.across * params_.down;
    add_lanes(channels * (kTaps + 1), put, [&](int i, int lane) {
      const float* tile = shared + i % (kTaps + 1) * pitch + i / (kTaps + 1) * tiles;
      float sum = 0;
      for (int t = lane; t < tiles; t += kSumLanes) {
        sum += tile[t];
      }
      return sum;
    });
  }

 private:
  static constexpr int kSpread = kSumLanes;  // in the banks, from sum to sum

  const NchwParams& params_;
  FmaPosition<Axis> at_;
  FmaWindow<Axis, T> window_;
  ColumnMasks<T, Shape::kCols> grad_inside_;
  float sum_[kTaps + 1] = {};
};

}  // namespace ops::cuda
