// nchw_mma: NCHW, 16 bits, stride 1: implicit GEMM on matrix units (mma.sync), stages of nchw.cuh.
//
//      16 rows of inputs      banded Toeplitz matrix       16 × 8 outputs,
//      ┌───────────────┐      ┌───────────┐                one product per filter row
//      │ 16 columns    │  ×   │ t         │ 16 inputs      ┌───────┐
//      │               │      │ t t       │           ──►  │ += 8  │
//      └───────────────┘      │ t t t   8 │                └───────┘
//                             └───────────┘ outputs
//
// The Toeplitz matrix of a filter row has its taps along diagonals. Most of it is zero, yet 7×7
// filters are twice as fast as with FMAs. Products are exact; accumulation is in float32. Elements
// are loaded in pairs (32-bit words), so widths are even.
//
//   block:   a range of feature maps or a band of rows of one
//   shared:  the ring buffer of nchw.cuh; outputs overwrite the inputs
//   thread:  4 accumulators per product; a warp has 16 rows × 16, 32 or 56 columns of 1 to 4 maps
//
// Weight gradient
//
//      16 rows of inputs,        8 rows of grad_output,      16 × 8 sums for filter column b,
//      columns shifted by b      transposed                  added up over all tiles
//      ┌────────────────┐        ┌───────────┐               ┌───────┐
//      │ 16 columns     │   ×    │ 16 columns│      ──►      │ +=    │  tap (a, b) = sum of the
//      └────────────────┘        └───────────┘               └───────┘  a-th diagonal
//
// A product with ones instead of inputs gives the bias gradient.
//
//   block:   a range of channels (or a band of one), of every gridDim.y-th image
//   shared:  a ring buffer of two stages: inputs and grad_output; at the end the accumulators
//   thread:  4 accumulators per filter column; a warp tile has 8 whole rows of grad_output
#include "core/cuda/mma.cuh"
#include "depthwise_conv2d/cuda/planes/nchw.cuh"

namespace ops::depthwise_conv2d {
namespace {

// Forward pass or input gradient of one warp tile: 16 rows × kProducts blocks of 8 columns, of
// kMaps adjacent maps.
template <typename TileAxis, int kProducts, typename T>
class MmaConvolution {
  static constexpr int kWidth = TileAxis::kTaps, kTaps = kWidth * kWidth;

 public:
  using Axis = TileAxis;
  static constexpr int kRows = 16, kCols = 8 * kProducts;
  // Limited by registers.
  static constexpr int kMaps = kProducts > 4 ? 1 : kProducts > 2 || kWidth == 7 ? 2 : 4;
  static constexpr int kThreads = 32, kThreadsPerBlock = 128, kThreadsPerSm = 512;
  static constexpr int kShift = 0;
  static_assert(Axis::kStride == 1 && 8 + kWidth <= 16, "a product's window");

  __device__ explicit MmaConvolution(const NchwParams& params)
      : params_(params),
        at_(params),
        odd_(params.start_w & 1),
        in_col_(params.start_w - odd_ + at_.col + 2 * lane_.t) {
#pragma unroll
    for (int i = 0; i <= kProducts; ++i) {
      inside_mask_ |= is_inside(in_col_ + 8 * i, params.in_w) ? 1u << i : 0u;
    }
  }

  __device__ int map() const { return at_.map; }  // first map within a stage

  __device__ void load_filter(const T* weight, const T* bias, int channel) {
    weight_ = weight;
    bias_data_ = bias;
    const int first = params_.flip ? kTaps - 1 : 0, step = params_.flip ? -1 : 1;
    const int col = opaque(2 * lane_.t - odd_ - lane_.g);
#pragma unroll
    for (int p = 0; p < kMaps; ++p) {
      const auto* bits = reinterpret_cast<const unsigned short*>(weight + channel * kTaps) + first;
      const auto tap = [&](int a, int b) -> unsigned {
        return b >= 0 && b < kWidth ? bits[step * (a * kWidth + b)] : 0;
      };
#pragma unroll
      for (int a = 0; a < kWidth; ++a) {
        toeplitz_[p][a][0] = tap(a, col) | tap(a, col + 1) << 16;
        toeplitz_[p][a][1] = tap(a, col + 8) | tap(a, col + 9) << 16;
      }
      bias_[p] = bias ? static_cast<float>(bias[channel]) : 0.0f;
      channel = channel + 1 < params_.channels ? channel + 1 : 0;
    }
  }

  // Compute the tile from the stage's inputs at shared[in_offset].
  __device__ void convolve(const T* shared, int in_offset, const Stage& stage) {
    const int pitch = params_.in_w / 2;  // in words
    const int y = params_.start_h + stage.out_row + at_.row + lane_.g;
    const unsigned* words = reinterpret_cast<const unsigned*>(shared + in_offset) + in_col_ / 2 +
                            (at_.map * stage.in_rows + y - stage.in_row) * pitch;
#pragma unroll
    for (int p = 0; p < kMaps; ++p, words += stage.in_rows * pitch) {
      if (at_.map + p >= stage.maps) {
        break;
      }
      const unsigned inside = opaque(inside_mask_);  // keep no masks of rows between maps
      float bias[4] = {bias_[p], bias_[p], bias_[p], bias_[p]};
#pragma unroll
      for (int a = 0; a < kWidth; ++a) {
        const unsigned upper_mask = params_.has_in_row(y + a) ? inside : 0;
        const unsigned lower_mask = params_.has_in_row(y + a + 8) ? inside : 0;
        unsigned upper[kProducts + 1], lower[kProducts + 1];  // output rows 0–7, 8–15
#pragma unroll
        for (int i = 0; i <= kProducts; ++i) {
          upper[i] = upper_mask & 1u << i ? words[4 * i + a * pitch] : 0;
          lower[i] = lower_mask & 1u << i ? words[4 * i + (a + 8) * pitch] : 0;
        }
#pragma unroll
        for (int n = 0; n < kProducts; ++n) {
          Packed<T>::mma(sum_[p][n], a == 0 ? bias : sum_[p][n], upper[n], lower[n], upper[n + 1],
                         lower[n + 1], toeplitz_[p][a]);
        }
      }
    }
  }

  // Store the tile to the stage's outputs in shared memory.
  __device__ void store(T* outputs, const Stage& stage, const T* in) const {
    const int pitch = params_.out_w / 2;
    const int row = at_.row + lane_.g, col = at_.col + 2 * lane_.t;
    float nan_check = 0;
    unsigned* words =
        reinterpret_cast<unsigned*>(outputs) + (at_.map * stage.out_rows + row) * pitch + col / 2;
#pragma unroll
    for (int p = 0; p < kMaps; ++p, words += stage.out_rows * pitch) {
      if (at_.map + p >= stage.maps) {
        break;
      }
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        const float (&sum)[4] = sum_[p][n];
        nan_check += (sum[0] + sum[1]) + (sum[2] + sum[3]);
        if (col + 8 * n < params_.out_w) {
          if (row < stage.out_rows) {
            words[4 * n] = Packed<T>::pack(sum[0], sum[1]);
          }
          if (row + 8 < stage.out_rows) {
            words[4 * n + 8 * pitch] = Packed<T>::pack(sum[2], sum[3]);
          }
        }
      }
    }
    if (__any_sync(~0u, isnan(nan_check))) {
      __syncwarp();  // reads of elements follow writes of words
      recompute_nan(outputs, stage, in);
    }
  }

 private:
  const NchwParams& params_;
  const Lane lane_;
  const TilePosition<MmaConvolution> at_;
  const int odd_;             // 1 if the first input column is odd: loads begin one column earlier
  const int in_col_;          // first column of the lane's pairs
  unsigned inside_mask_ = 0;  // bit i: the pair of column block i is inside the image
  unsigned toeplitz_[kMaps][kWidth][2];  // fragments of a matrix per filter row
  const T *weight_, *bias_data_;
  float bias_[kMaps];
  float sum_[kMaps][kProducts][4];

  // Recompute the lane's outputs that are NaN: zeros of the matrix times non-finite inputs.
  __device__ void recompute_nan(T* outputs, const Stage& stage, const T* in) const {
#pragma unroll 1
    for (int i = 0; i < kMaps * kProducts * 4; ++i) {
      const int p = at_.map + i / (4 * kProducts);
      const int row = at_.row + lane_.g + i / 2 % 2 * 8;
      const int col = at_.col + 2 * lane_.t + i / 4 % kProducts * 8 + i % 2;
      if (p >= stage.maps || row >= stage.out_rows || col >= params_.out_w) {
        continue;
      }
      T& output = outputs[(p * stage.out_rows + row) * params_.out_w + col];
      if (isnan(static_cast<float>(output))) {
        const int64_t map = stage.map + p, channel = map % params_.channels;
        const float exact =
            exact_output<kWidth>(in + map * params_.in_h * params_.in_w, params_.in_w, 1,
                                 params_.in_h, params_.in_w, params_.start_h + stage.out_row + row,
                                 params_.start_w + col, weight_ + channel * kTaps, params_.flip);
        output =
            static_cast<T>((bias_data_ ? static_cast<float>(bias_data_[channel]) : 0.0f) + exact);
      }
    }
  }
};

// Sums of one warp tile, 8 whole rows of grad_output, for the gradients of a filter and its bias.
template <typename TileAxis, typename T>
class MmaWeightGradient {
  static constexpr int kWidth = TileAxis::kTaps;

 public:
  using Axis = TileAxis;
  static constexpr int kTaps = kWidth * kWidth;
  static constexpr int kRows = 8, kCols = 1 << 20;
  static constexpr int kMaps = 1, kThreads = 32;
  static constexpr int kThreadsPerBlock = 256, kThreadsPerSm = 512;
  static constexpr int kShift = 0, kReduceLanes = 8;
  // Parity of "same" padding. Odd: loads start one column earlier, at an aligned 32-bit word.
  static constexpr int kOdd = (kWidth - 1) / 2 % 2;
  static_assert(Axis::kStride == 1 && kRows + kWidth <= 16, "the window of a product's rows");

  __device__ explicit MmaWeightGradient(const NchwParams& params) : params_(params), at_(params) {}

  __device__ int map() const { return at_.map; }

  // Accumulate a stage: inputs at shared[in_offset], grad_output at shared[grad_offset].
  __device__ void add(const T* shared, int in_offset, int grad_offset, const Stage& stage) {
    const int in_pitch = params_.in_w / 2, out_pitch = params_.out_w / 2;  // in words
    const int row = at_.row + lane_.g;
    const unsigned* grad = reinterpret_cast<const unsigned*>(shared + grad_offset) +
                           (at_.map * stage.out_rows + row) * out_pitch + lane_.t;
    const int y = params_.start_h + stage.out_row + row;
    int in_col = params_.start_w - kOdd + 2 * lane_.t;
    const unsigned* upper = reinterpret_cast<const unsigned*>(shared + in_offset) + in_col / 2 +
                            (at_.map * stage.in_rows + y - stage.in_row) * in_pitch;
    const unsigned* lower = upper + 8 * in_pitch;
    // Row widths; 0 for rows outside the image.
    const unsigned upper_w = params_.has_in_row(y) ? params_.in_w : 0;
    const unsigned lower_w = params_.has_in_row(y + 8) && lane_.g < kWidth - 1 ? params_.in_w : 0;
    const int out_w = row < stage.out_rows ? params_.out_w : 0;
#pragma unroll 1
    for (int col = 2 * lane_.t, products = (params_.out_w + 15) / 16; products > 0; --products) {
      const unsigned g[2] = {col < out_w ? grad[0] : 0, col + 8 < out_w ? grad[4] : 0};
      unsigned in[4][kWords];  // of window rows g and g + 8, then both 8 columns further
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const unsigned left = in_col + 2 * j, right = left + 8;
        in[0][j] = left < upper_w ? upper[j] : 0;
        in[1][j] = left < lower_w ? lower[j] : 0;
        in[2][j] = right < upper_w ? upper[4 + j] : 0;
        in[3][j] = right < lower_w ? lower[4 + j] : 0;
      }
#pragma unroll
      for (int b = 0; b < kWidth; ++b) {
        Packed<T>::mma(sum_[b], sum_[b], input_pair(in[0], b), input_pair(in[1], b),
                       input_pair(in[2], b), input_pair(in[3], b), g);
      }
      constexpr unsigned kOnes = Packed<T>::kOnes;
      Packed<T>::mma(sum_[kWidth], sum_[kWidth], kOnes, kOnes, kOnes, kOnes, g);
      col += 16, in_col += 16, upper += 8, lower += 8, grad += 8;
    }
  }

  static size_t shared_floats(int threads) {
    return static_cast<size_t>(threads / 32) * kMatrices * kMatrixSize;
  }
  __device__ void store_sums(float* shared) const {
    shared += threadIdx.x / 32 * kMatrices * kMatrixSize + lane_.g * 8 + 2 * lane_.t;
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared[i * kMatrixSize + j / 2 * 64 + j % 2] = sum_[i][j];
      }
    }
  }
  // Return the lane's part of sum i, counted over the maps of the block.
  __device__ float partial_sum(const float* shared, int i, int lane) const {
    const int tap = i % (kTaps + 1), tiles = params_.tiles_w * params_.tiles_h;
    const int matrix = tap < kTaps ? tap % kWidth : kWidth;
    const int row = tap < kTaps ? lane + tap / kWidth : 0;
    const float* tile = shared + (i / (kTaps + 1) * tiles * kMatrices + matrix) * kMatrixSize;
    float sum = 0;
    for (int t = 0; t < tiles; ++t, tile += kMatrices * kMatrixSize) {
      sum += tile[row * 8 + lane];
    }
    return sum;
  }

 private:
  // 32-bit words of inputs that a lane needs for all filter columns.
  static constexpr int kWords = (kOdd + kWidth - 1) / 2 + 1 + kOdd;
  static constexpr int kMatrices = kWidth + 1, kMatrixSize = 16 * 8;

  const NchwParams& params_;
  const Lane lane_;
  const TilePosition<MmaWeightGradient> at_;
  float sum_[kMatrices][4] = {};  // one matrix per filter column, and one for the bias

  // Return the inputs of two adjacent outputs at filter column b, packed.
  static __device__ unsigned input_pair(const unsigned (&words)[kWords], int b) {
    const int first = kOdd + b;
    return first % 2 ? __byte_perm(words[first / 2], words[first / 2 + 1], 0x5432)
                     : words[first / 2];
  }
};

// Return f(axis) for 7×7, and for smaller filters on images 16 columns wide, where nchw_fma has
// bank conflicts (measured on an H200); otherwise false.
template <typename F>
bool dispatch_nchw_mma(const Geometry& g, int64_t in_w, int64_t out_w,
                       std::initializer_list<const void*> pointers, const F& f) {
  // Widths with more than 2-way bank conflicts if a warp reads 4 adjacent words of each of 8 rows.
  constexpr int64_t kConflicts[] = {0, 2, 22, 32, 42, 62};  // modulo 64
  if (in_w % 2 != 0 || out_w % 2 != 0 || !are_aligned(pointers, 4) ||
      std::find(std::begin(kConflicts), std::end(kConflicts), in_w % 64) != std::end(kConflicts)) {
    return false;
  }
  return dispatch_forward_axis(g, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kStride == 1 && Axis::kDilation == 1) {
      return (Axis::kTaps == 7 || in_w == 16) && f(axis);
    }
    return false;
  });
}

}  // namespace

template <typename T>
bool nchw_mma(const Convolution<T>& c) {
  // Of narrower maps, most of a tile of 16 columns would be idle.
  return !c.transposed && c.out.w > 8 &&
         dispatch_nchw_mma(c.g, c.in.w, c.out.w, {c.in.data, c.out.data}, [&](auto axis) {
           using Axis = decltype(axis);
           if constexpr (Axis::kTaps == 7) {
             if (c.out.w > 32) return launch_nchw<MmaConvolution<Axis, 7, T>>(c);
             if (c.out.w > 16) return launch_nchw<MmaConvolution<Axis, 4, T>>(c);
           }
           return launch_nchw<MmaConvolution<Axis, 2, T>>(c);
         });
}

template <typename T>
bool nchw_mma_weight_gradient(const WeightGradient<T>& c) {
  return dispatch_nchw_mma(c.g, c.g.w, c.g.out_w, {c.x, c.grad}, [&](auto axis) {
    using Axis = decltype(axis);
    if constexpr (Axis::kTaps > 3) {  // 3×3: nchw_fma is 1.2 times as fast (H200)
      using Tile = MmaWeightGradient<Axis, T>;
      return c.g.padding_w % 2 == Tile::kOdd && launch_nchw<Tile>(c);
    }
    return false;
  });
}

template bool nchw_mma(const Convolution<Half>&);
template bool nchw_mma(const Convolution<BFloat16>&);
template bool nchw_mma_weight_gradient(const WeightGradient<Half>&);
template bool nchw_mma_weight_gradient(const WeightGradient<BFloat16>&);

}  // namespace ops::depthwise_conv2d
