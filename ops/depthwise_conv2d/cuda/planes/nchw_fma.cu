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
#include "core/cuda/mma.cuh"
#include "depthwise_conv2d/cuda/planes/nchw.cuh"

namespace ops::depthwise_conv2d {
namespace {

// Height and width of the images that a thread computes as a whole.
constexpr int kWholeSize = 7;

// Return f(WholeAxis<K, kWholeSize>{}) for images of that size with "same" padding, else false.
template <typename F>
bool dispatch_whole_axis(const Geometry& g, const F& f) {
  if (g.h != kWholeSize || g.w != kWholeSize || g.padding_h * 2 != g.kernel_h - 1 ||
      g.padding_w * 2 != g.kernel_w - 1) {
    return false;
  }
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kStride == 1 && Axis::kDilation == 1) {
      return f(WholeAxis<Axis::kTaps, kWholeSize>{});
    }
    return false;
  });
}

// Mask that keeps an element, for `masked`.
template <typename T>
constexpr unsigned kKeep = std::is_same_v<T, BFloat16> ? 1u << 16
                           : std::is_same_v<T, Half>   ? 0xffff
                                                       : ~0u;

// Convert to float32; return zero if `mask` is 0 instead of kKeep. One integer instruction.
template <typename T>
__device__ float masked(T x, unsigned mask) {
  if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(__float_as_uint(x) & mask);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __uint_as_float(x.x * mask);  // bfloat16 is the upper half of a float32
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(x.x & mask)));
  }
}

// Masks of kCount columns from `first` on: zero outside the image.
template <typename T, int kCount>
struct ColumnMasks {
  unsigned mask[kCount];

  __device__ ColumnMasks(int first, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      mask[i] = is_inside(first + i, width) ? kKeep<T> : 0;
    }
  }

  __device__ void load(const T* from, float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = masked(from[i], mask[i]);
    }
  }
};

// Register tile of a thread, and its input window in shared memory. 7 columns: an odd stride avoids
// bank conflicts, and 7 divides the usual widths 7, 14, 28, 56, 112, 224.
template <typename TileAxis, typename T>
class FmaTile {
 public:
  using Axis = TileAxis;
  static constexpr bool kTransposed = Axis::kTransposed;
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  static constexpr int kRows = Axis::kWhole         ? kWholeSize
                               : Axis::kTaps == 7   ? 4  // limited by registers
                               : kTransposed        ? (Axis::kTaps == 3 ? 6 : 4)
                               : Axis::kStride == 2 ? 5
                                                    : 7;
  static constexpr int kCols = kTransposed ? 14 : 7;
  static constexpr int kMaps = 1, kThreads = 1;
  // Whole images: fewer threads have longer pipelines, up to 1.17 times as fast (H100).
  static constexpr int kThreadsPerBlock = 128, kThreadsPerSm = Axis::kWhole ? 256 : 512;
  static constexpr int kShift = kTransposed ? 2 : 1;

  __device__ explicit FmaTile(const NchwParams& params)
      : params_(params),
        at_(params),
        in_col_(params.start_w + Axis::step(at_.col)),
        in_columns_(in_col_, params.in_w) {}

  __device__ int map() const { return at_.map; }  // of a stage

 protected:
  static constexpr int kZeros = kZerosOffset / sizeof(T);

  // Call multiply(q, j, tap, x) for each tap of each output (q, j) of the tile; x is the input that
  // the tap reads. The stage's inputs are at shared[in_offset].
  template <typename F>
  __device__ __forceinline__ void multiply_taps(const T* shared, int in_offset, const Stage& stage,
                                                const F& multiply) const {
    constexpr int kInRows = Axis::inputs(kRows), kInCols = Axis::inputs(kCols);
    const int y = params_.start_h + Axis::step(stage.out_row + at_.row);
    const int window =
        in_offset + (at_.map * stage.in_rows + y - stage.in_row) * params_.in_w + in_col_;
#pragma unroll
    for (int r = 0; r < kInRows; ++r) {
      float x[kInCols];
      const bool within = params_.has_in_row(y + r);
      in_columns_.load(shared + (within ? window + r * params_.in_w : kZeros), x);
      for_each_tap<Axis, kRows, kCols>(
          r, [&](int q, int j, int tap, int i) { multiply(q, j, tap, x[i]); });
    }
  }

  const NchwParams& params_;
  const TilePosition<FmaTile> at_;

 private:
  const int in_col_;
  const ColumnMasks<T, Axis::inputs(kCols)> in_columns_;
};

// Forward pass or input gradient of one tile.
template <typename Axis, typename T>
class FmaConvolution : public FmaTile<Axis, T> {
  using Tile = FmaTile<Axis, T>;

 public:
  using Tile::kRows, Tile::kCols, Tile::kTaps;
  using Tile::Tile;
  static constexpr int kThreadsPerBlock = Axis::kWhole ? 64 : Tile::kThreadsPerBlock;

  __device__ void load_filter(const T* __restrict__ weight, const T* __restrict__ bias,
                              int channel) {
    weight += channel * kTaps + (params_.flip ? kTaps - 1 : 0);
    const int step = opaque(params_.flip ? -1 : 1);
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      tap_[i] = static_cast<float>(weight[step * i]);
    }
    bias_ = bias ? static_cast<float>(bias[channel]) : 0.0f;
  }

  // Compute the tile from the stage's inputs at shared[in_offset].
  __device__ void convolve(const T* shared, int in_offset, const Stage& stage) {
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        sum_[q][j] = bias_;
      }
    }
    this->multiply_taps(shared, in_offset, stage,
                        [&](int q, int j, int tap, float x) { sum_[q][j] += tap_[tap] * x; });
  }

  // Store the tile to the stage's outputs in shared memory.
  __device__ void store(T* outputs, const Stage& stage, const T* /*in*/) const {
    T* to = outputs + (at_.map * stage.out_rows + at_.row) * params_.out_w + at_.col;
    const int rows = stage.out_rows - at_.row, cols = params_.out_w - at_.col;
    if constexpr (Tile::kTransposed && sizeof(T) == 2) {  // the tile's columns are even
      if (params_.out_w % 2 == 0 && reinterpret_cast<uintptr_t>(outputs) % sizeof(unsigned) == 0) {
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
#pragma unroll
          for (int j = 0; j < kCols; j += 2) {
            if (q < rows && j < cols && at_.col + j >= 0) {
              *reinterpret_cast<unsigned*>(to + q * params_.out_w + j) =
                  Packed<T>::pack(sum_[q][j], sum_[q][j + 1]);
            }
          }
        }
        return;
      }
    }
    const auto store_if = [&](const auto& is_output) {
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (is_output(q, j)) {
            to[q * params_.out_w + j] = static_cast<T>(sum_[q][j]);
          }
        }
      }
    };
    if (rows >= kRows && cols >= kCols && at_.col >= 0) {
      store_if([](int, int) { return true; });
    } else {
      store_if([&](int q, int j) { return q < rows && j < cols && at_.col + j >= 0; });
    }
  }

 private:
  using Tile::params_, Tile::at_;

  float tap_[kTaps], bias_;
  float sum_[kRows][kCols];
};

// Sums of one tile for the gradients of a filter and its bias.
template <typename Axis, typename T>
class FmaWeightGradient : public FmaTile<Axis, T> {
  using Tile = FmaTile<Axis, T>;

 public:
  using Tile::kRows, Tile::kCols, Tile::kTaps;
  static constexpr int kReduceLanes = Axis::kWhole ? 1 : 8;  // that add the tiles of a map

  __device__ explicit FmaWeightGradient(const NchwParams& params)
      : Tile(params), grad_columns_(at_.col, params.out_w) {}

  // Accumulate a stage: inputs at shared[in_offset], grad_output at shared[grad_offset].
  __device__ void add(const T* shared, int in_offset, int grad_offset, const Stage& stage) {
    float g[kRows][kCols];
    grad_offset += (at_.map * stage.out_rows + at_.row) * params_.out_w + at_.col;
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const bool within = at_.row + q < stage.out_rows;
      grad_columns_.load(shared + (within ? grad_offset + q * params_.out_w : Tile::kZeros), g[q]);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        sum_[kTaps] += g[q][j];
      }
    }
    this->multiply_taps(shared, in_offset, stage,
                        [&](int q, int j, int tap, float x) { sum_[tap] += g[q][j] * x; });
  }

  // Shared memory for the sums of a block.
  static size_t shared_floats(int threads) {
    return static_cast<size_t>(kTaps + 1) * (threads + kPad);
  }
  __device__ void store_sums(float* shared) const {
#pragma unroll
    for (int i = 0; i <= kTaps; ++i) {
      shared[i * (blockDim.x + kPad) + threadIdx.x] = sum_[i];
    }
  }
  // Return the lane's part of sum i, counted over the maps of the block.
  __device__ float partial_sum(const float* shared, int i, int lane) const {
    const int tiles = params_.tiles_w * params_.tiles_h;
    shared += i % (kTaps + 1) * (blockDim.x + kPad) + i / (kTaps + 1) * tiles;
    float sum = 0;
    for (int t = lane; t < tiles; t += kReduceLanes) {
      sum += shared[t];
    }
    return sum;
  }

 private:
  static constexpr int kPad = kReduceLanes;  // padding against bank conflicts
  using Tile::params_, Tile::at_;

  const ColumnMasks<T, kCols> grad_columns_;
  float sum_[kTaps + 1] = {};
};

}  // namespace

template <typename T>
bool nchw_fma(const Convolution<T>& c) {
  const auto launch = [&](auto axis) { return launch_nchw<FmaConvolution<decltype(axis), T>>(c); };
  if constexpr (sizeof(T) == 2) {  // float32: shared memory fits too few of these blocks
    if (dispatch_whole_axis(c.g, launch)) {
      return true;
    }
  }
  return dispatch_axis(c.g, c.transposed, launch);
}

template <typename T>
bool nchw_fma_weight_gradient(const WeightGradient<T>& c) {
  const auto launch = [&](auto axis) {
    return launch_nchw<FmaWeightGradient<decltype(axis), T>>(c);
  };
  return dispatch_whole_axis(c.g, launch) || dispatch_forward_axis(c.g, launch);
}

template bool nchw_fma(const Convolution<float>&);
template bool nchw_fma(const Convolution<Half>&);
template bool nchw_fma(const Convolution<BFloat16>&);
template bool nchw_fma_weight_gradient(const WeightGradient<float>&);
template bool nchw_fma_weight_gradient(const WeightGradient<Half>&);
template bool nchw_fma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::depthwise_conv2d
