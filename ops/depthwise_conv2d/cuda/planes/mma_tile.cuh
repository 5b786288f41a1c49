// Implicit GEMM of nchw_mma (16 bits, stride 1): warp tiles of feature maps.
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
// Fragments: core/cuda/mma.cuh.
#pragma once

#include "core/cuda/mma.cuh"
#include "depthwise_conv2d/cuda/planes/nchw_stage.cuh"

namespace ops::depthwise_conv2d {

// Return one output, tap by tap. Its window begins at row y, column x of the in_h × in_w map, whose
// columns are `stride` elements apart.
template <int kWidth, typename T>
__device__ __noinline__ float exact_output(const T* map, int64_t pitch, int stride, int in_h,
                                           int in_w, int y, int x, const T* filter, bool flip) {
  float sum = 0;
  for (int i = 0; i < kWidth * kWidth; ++i) {
    const int row = y + i / kWidth, col = x + i % kWidth;
    if (row >= 0 && row < in_h && col >= 0 && col < in_w) {
      sum += static_cast<float>(filter[flip ? kWidth * kWidth - 1 - i : i]) *
             static_cast<float>(map[row * pitch + col * static_cast<int64_t>(stride)]);
    }
  }
  return sum;
}

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

}  // namespace ops::depthwise_conv2d
