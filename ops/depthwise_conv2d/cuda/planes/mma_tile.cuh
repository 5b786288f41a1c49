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

namespace ops::cuda {

// Fragments of the Toeplitz matrices (16 inputs × 8 outputs), one per filter row.
template <int kWidth, typename T>
struct ToeplitzFilter {
  unsigned rows[kWidth][2];

  // `odd` (0 or 1): inputs are loaded from one column before the first window.
  __device__ void load(const T* filter, bool flip, int odd) {
    const Lane lane;
    const auto tap = [&](int a, int b) -> unsigned {
      const int i = a * kWidth + b;
      const auto* bits = reinterpret_cast<const unsigned short*>(filter);
      return b >= 0 && b < kWidth ? bits[flip ? kWidth * kWidth - 1 - i : i] : 0;
    };
#pragma unroll
    for (int a = 0; a < kWidth; ++a) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int b = 8 * i + 2 * lane.t - odd - lane.g;
        rows[a][i] = tap(a, b) | tap(a, b + 1) << 16;
      }
    }
  }
};

// Compute sum = bias + Σ inputs × Toeplitz matrix over the filter rows, for 16 rows × kProducts
// blocks of 8 output columns. load(a, upper, lower) loads the inputs of filter row a, in blocks of
// 8 columns, for output rows 0–7 and 8–15.
template <int kProducts, int kWidth, typename T, typename Load>
__device__ void gemm(float (&sum)[kProducts][4], float bias,
                     const ToeplitzFilter<kWidth, T>& filter, const Load& load) {
  float initial[4] = {bias, bias, bias, bias};
#pragma unroll
  for (int a = 0; a < kWidth; ++a) {
    unsigned upper[kProducts + 1], lower[kProducts + 1];
    load(a, upper, lower);
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      const auto& before = a == 0 ? initial : sum[n];
      Packed<T>::mma(sum[n], before, upper[n], lower[n], upper[n + 1], lower[n + 1],
                     filter.rows[a]);
    }
  }
}

// Zeros of the filter's matrix times non-finite inputs are NaN. Recompute sums that are NaN: result
// i of product n is exact(n, i).
template <int kProducts, typename F>
__device__ void recompute_nan(float (&sum)[kProducts][4], const F& exact) {
  bool any = false;
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      any |= isnan(sum[n][i]);
    }
  }
  if (!any) {
    return;
  }
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (isnan(sum[n][i])) {
        sum[n][i] = exact(n, i);
      }
    }
  }
}

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

// A warp tile: 16 rows × kProducts blocks of 8 columns, of kMaps adjacent maps.
template <typename Axis, int kProductsAcross>
struct MmaShape {
  static constexpr int kWidth = Axis::kTaps;
  static constexpr int kProducts = kProductsAcross;
  static constexpr int kColumnBlocks = kProducts + 1;
  static constexpr int kRows = 16, kCols = 8 * kProducts;
  // Limited by registers.
  static constexpr int kMaps = kProducts > 4 ? 1 : kProducts > 2 || kWidth == 7 ? 2 : 4;
  static constexpr int kThreads = 32;
  static constexpr int kThreadsPerBlock = 128;
  static constexpr int kThreadsPerSm = 512;
  static_assert(Axis::kStride == 1 && 8 + kWidth <= 16, "a product's window");
};

// A warp's tile within every stage: its first map and output.
template <typename Shape>
struct MmaPosition {
  int map, row, col;

  __device__ explicit MmaPosition(const NchwParams& params) {
    const int tile = threadIdx.x / 32;
    const int line = tile / params.tiles_w;
    map = line / params.tiles_h * Shape::kMaps;
    row = line % params.tiles_h * Shape::kRows;
    col = tile % params.tiles_w * Shape::kCols;
  }
};

// Forward pass or input gradient of one warp tile, NCHW. Members as in FmaTile.
template <typename TileAxis, int kProducts, typename Element>
class MmaTile {
 public:
  using Axis = TileAxis;
  using T = Element;
  using Shape = MmaShape<Axis, kProducts>;

  __device__ explicit MmaTile(const NchwParams& params)
      : params_(params),
        at_(params),
        odd_(params.start_w & 1),
        in_col_(params.start_w - odd_ + at_.col + 2 * lane_.t) {
#pragma unroll
    for (int i = 0; i < Shape::kColumnBlocks; ++i) {
      const bool inside = is_inside(in_col_ + 8 * i, params.in_w);
      inside_mask_ |= inside ? 1u << i : 0u;
    }
  }

  __device__ int map() const { return at_.map; }  // first map within a stage

  __device__ void load_filter(const T* weight, const T* bias, int channel, bool flip) {
    flip_ = flip;
#pragma unroll
    for (int p = 0; p < Shape::kMaps; ++p) {
      channel = params_.wrap_channel(channel + (p > 0));
      weight_[p] = weight + channel * kWidth * kWidth;
      bias_[p] = bias ? static_cast<float>(bias[channel]) : 0.0f;
      filter_[p].load(weight_[p], flip, odd_);
    }
  }

  __device__ void convolve(const T* shared, int /*zeros*/, int in_offset, const Stage& stage) {
    const int pitch = params_.in_w / 2;  // in words
    const int y = params_.start_h + stage.out_row + at_.row + lane_.g;
    const unsigned* words = reinterpret_cast<const unsigned*>(shared + in_offset) + in_col_ / 2 +
                            (at_.map * stage.in_rows + y - stage.in_row) * pitch;
#pragma unroll
    for (int p = 0; p < Shape::kMaps; ++p, words += stage.in_rows * pitch) {
      if (at_.map + p >= stage.maps) {
        break;
      }
      using ColumnBlocks = unsigned[Shape::kColumnBlocks];
      gemm(sum_[p], bias_[p], filter_[p], [&](int a, ColumnBlocks& upper, ColumnBlocks& lower) {
        const unsigned upper_mask = params_.has_in_row(y + a) ? inside_mask_ : 0;
        const unsigned lower_mask = params_.has_in_row(y + a + 8) ? inside_mask_ : 0;
#pragma unroll
        for (int i = 0; i < Shape::kColumnBlocks; ++i) {
          upper[i] = upper_mask & 1u << i ? words[4 * i + a * pitch] : 0;
          lower[i] = lower_mask & 1u << i ? words[4 * i + (a + 8) * pitch] : 0;
        }
      });
      recompute_nan(sum_[p], [&](int n, int i) {
        const T* map =
            shared + in_offset + ((at_.map + p) * stage.in_rows - stage.in_row) * params_.in_w;
        return bias_[p] +
               exact_output<kWidth>(map, params_.in_w, 1, params_.in_h, params_.in_w, y + i / 2 * 8,
                                    params_.start_w + at_.col + 2 * lane_.t + 8 * n + i % 2,
                                    weight_[p], flip_);
      });
    }
  }

  __device__ void store(T* outputs, const Stage& stage) const {
    const int pitch = params_.out_w / 2;
    const int row = at_.row + lane_.g, col = at_.col + 2 * lane_.t;
    unsigned* words =
        reinterpret_cast<unsigned*>(outputs) + (at_.map * stage.out_rows + row) * pitch + col / 2;
#pragma unroll
    for (int p = 0; p < Shape::kMaps; ++p, words += stage.out_rows * pitch) {
      if (at_.map + p >= stage.maps) {
        break;
      }
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        if (col + 8 * n < params_.out_w) {
          if (row < stage.out_rows) {
            words[4 * n] = Packed<T>::pack(sum_[p][n][0], sum_[p][n][1]);
          }
          if (row + 8 < stage.out_rows) {
            words[4 * n + 8 * pitch] = Packed<T>::pack(sum_[p][n][2], sum_[p][n][3]);
          }
        }
      }
    }
  }

 private:
  static constexpr int kWidth = Axis::kTaps;

  const NchwParams& params_;
  const Lane lane_;
  const MmaPosition<Shape> at_;
  const int odd_;             // 1 if the first input column is odd: loads begin one column earlier
  const int in_col_;          // first column of the lane's pairs
  unsigned inside_mask_ = 0;  // bit i: the pair of column block i is inside the image
  ToeplitzFilter<kWidth, T> filter_[Shape::kMaps];
  const T* weight_[Shape::kMaps];
  float bias_[Shape::kMaps];
  float sum_[Shape::kMaps][kProducts][4];
  bool flip_;
};

}  // namespace ops::cuda
