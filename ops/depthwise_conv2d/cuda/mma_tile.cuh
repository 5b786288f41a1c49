// Implicit GEMM of the mma families: a warp computes tiles of 16-bit feature maps, with stride 1.
//
//      16 rows of inputs      banded Toeplitz matrix       16 × 8 outputs,
//      ┌───────────────┐      ┌───────────┐                a product a row of the filter
//      │ 16 columns    │  ×   │ t         │ 16 inputs      ┌───────┐
//      │               │      │ t t       │           ──►  │ += 8  │
//      └───────────────┘      │ t t t   8 │                └───────┘
//                             └───────────┘ outputs
//
// A row of a filter, its taps along diagonals, takes neighbouring inputs to neighbouring outputs.
// Most of the matrix is zero, and still 7×7 filters are twice as fast as by fused multiply-adds.
// Products are exact, sums are in float32.
//
// Pairs of elements move at once, so widths are even; NHWC is transposed first, see nhwc_mma.cuh.
// Lane 4 g + t of a warp holds, of a product's 16 × 8 results, columns 2 t and 2 t + 1 of rows g
// and g + 8; of the left factor the same rows, of the right one column g, and of both elements 2 t,
// 2 t + 1 and these + 8 along the sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "depthwise_conv2d/cuda/nchw_stage.cuh"

namespace ops::cuda {

struct Lane {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
};

template <typename T>
struct Packed;

template <>
struct Packed<BFloat16> {
  static constexpr unsigned kOnes = 0x3f803f80;
  static __device__ unsigned pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
  }
  // result = sum + left · right.
  static __device__ void multiply(float (&result)[4], const float (&sum)[4], unsigned l0,
                                  unsigned l1, unsigned l2, unsigned l3,
                                  const unsigned (&right)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
        : "r"(l0), "r"(l1), "r"(l2), "r"(l3), "r"(right[0]), "r"(right[1]), "f"(sum[0]),
          "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
#else
    __trap();  // see has_mma
#endif
  }
};

template <>
struct Packed<Half> {
  static constexpr unsigned kOnes = 0x3c003c00;
  static __device__ unsigned pack(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
  }
  static __device__ void multiply(float (&result)[4], const float (&sum)[4], unsigned l0,
                                  unsigned l1, unsigned l2, unsigned l3,
                                  const unsigned (&right)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
        : "r"(l0), "r"(l1), "r"(l2), "r"(l3), "r"(right[0]), "r"(right[1]), "f"(sum[0]),
          "f"(sum[1]), "f"(sum[2]), "f"(sum[3]));
#else
    __trap();  // see has_mma
#endif
  }
};

// The rows of a filter as matrices: row a takes two pieces of 8 inputs to 8 outputs.
template <int kWidth, typename T>
struct ToeplitzFilter {
  unsigned rows[kWidth][2];

  // Windows begin `odd` inputs before those of the first output.
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

// sum = bias + the filter times windows of inputs, kProducts pieces of 8 outputs beside each other
// in each of 16 rows. load(a, upper, lower): the pieces of inputs that row a of the filter meets,
// those of the first 8 rows and of the others.
template <int kProducts, int kWidth, typename T, typename Load>
__device__ void multiply(float (&sum)[kProducts][4], float bias,
                         const ToeplitzFilter<kWidth, T>& filter, const Load& load) {
  float initial[4] = {bias, bias, bias, bias};
#pragma unroll
  for (int a = 0; a < kWidth; ++a) {
    unsigned upper[kProducts + 1], lower[kProducts + 1];
    load(a, upper, lower);
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      const auto& before = a == 0 ? initial : sum[n];
      Packed<T>::multiply(sum[n], before, upper[n], lower[n], upper[n + 1], lower[n + 1],
                          filter.rows[a]);
    }
  }
}

// Zeros of the matrices times inputs that are not finite are not a number. Those sums again, tap by
// tap: exact(row, column) of a result, from the lane's first on.
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
        sum[n][i] = exact(i / 2 * 8, 8 * n + i % 2);
      }
    }
  }
}

// The sum of a filter's taps times the inputs whose window begins in row y, column x of an image of
// in_h × in_w elements, of which `map` is the first.
template <int kWidth, typename T>
__device__ __noinline__ float exact_output(const T* map, int pitch, int in_h, int in_w, int y,
                                           int x, const T* filter, bool flip) {
  float sum = 0;
  for (int i = 0; i < kWidth * kWidth; ++i) {
    const int row = y + i / kWidth, col = x + i % kWidth;
    if (row >= 0 && row < in_h && col >= 0 && col < in_w) {
      sum += static_cast<float>(filter[flip ? kWidth * kWidth - 1 - i : i]) *
             static_cast<float>(map[row * pitch + col]);
    }
  }
  return sum;
}

// 16 rows of outputs of kMaps neighbouring maps, kProducts matrix products beside each other.
template <typename Axis, int kProductsAcross>
struct MmaShape {
  static constexpr int kWidth = Axis::kTaps;
  static constexpr int kProducts = kProductsAcross;
  static constexpr int kPieces = kProducts + 1;
  static constexpr int kRows = 16, kCols = 8 * kProducts;
  // As registers allow.
  static constexpr int kMaps = kProducts > 4 ? 1 : kProducts > 2 || kWidth == 7 ? 2 : 4;
  static constexpr int kThreads = 32;
  static constexpr int kThreadsPerBlock = 128;
  static constexpr int kThreadsPerSm = 512;
  static_assert(Axis::step(1) == 1 && 8 + kWidth <= 16, "a product's window");
};

// The tile that a warp computes in every range of maps: its first map and output.
template <typename Shape>
struct MmaPosition {
  int map, row, col;

  __device__ explicit MmaPosition(const NchwParams& params) {
    const int tile = threadIdx.x / 32;
    const int line = tile / params.across;
    map = line / params.down * Shape::kMaps;
    row = line % params.down * Shape::kRows;
    col = tile % params.across * Shape::kCols;
  }
};

// A tile of the convolution of contiguous images.
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
    for (int i = 0; i < Shape::kPieces; ++i) {
      const bool inside =
          static_cast<unsigned>(in_col_ + 8 * i) < static_cast<unsigned>(params.in_w);
      inside_ |= inside ? 1u << i : 0u;
    }
  }

  __device__ int map() const { return at_.map; }  // the first, of a range

  __device__ void load_filter(const T* weight, const T* bias, int channel, bool flip) {
    flip_ = flip;
#pragma unroll
    for (int p = 0; p < Shape::kMaps; ++p) {
      channel = params_.wrap(channel + (p > 0));
      weight_[p] = weight + channel * kWidth * kWidth;
      bias_[p] = bias ? static_cast<float>(bias[channel]) : 0.0f;
      filter_[p].load(weight_[p], flip, odd_);
    }
  }

  __device__ void convolve(const T* shared, int /*zeros*/, int maps, const StageRange& range) {
    const int pitch = params_.in_w / 2;  // in words
    const int y = params_.start_h + range.out_row + at_.row + lane_.g;
    const unsigned* words = reinterpret_cast<const unsigned*>(shared + maps) + in_col_ / 2 +
                            (at_.map * range.in_rows + y - range.in_row) * pitch;
#pragma unroll
    for (int p = 0; p < Shape::kMaps; ++p, words += range.in_rows * pitch) {
      if (at_.map + p >= range.maps) {
        break;
      }
      using Pieces = unsigned[Shape::kPieces];
      multiply(sum_[p], bias_[p], filter_[p], [&](int a, Pieces& upper, Pieces& lower) {
        const unsigned of_upper = params_.has_in_row(y + a) ? inside_ : 0;
        const unsigned of_lower = params_.has_in_row(y + a + 8) ? inside_ : 0;
#pragma unroll
        for (int i = 0; i < Shape::kPieces; ++i) {
          upper[i] = of_upper & 1u << i ? words[4 * i + a * pitch] : 0;
          lower[i] = of_lower & 1u << i ? words[4 * i + (a + 8) * pitch] : 0;
        }
      });
      recompute_nan(sum_[p], [&](int row, int col) {
        const T* map =
            shared + maps + ((at_.map + p) * range.in_rows - range.in_row) * params_.in_w;
        return bias_[p] + exact_output<kWidth>(
                              map, params_.in_w, params_.in_h, params_.in_w, y + row,
                              params_.start_w + at_.col + 2 * lane_.t + col, weight_[p], flip_);
      });
    }
  }

  __device__ void store(T* maps, const StageRange& range) const {
    const int pitch = params_.out_w / 2;
    const int row = at_.row + lane_.g, col = at_.col + 2 * lane_.t;
    unsigned* words =
        reinterpret_cast<unsigned*>(maps) + (at_.map * range.out_rows + row) * pitch + col / 2;
#pragma unroll
    for (int p = 0; p < Shape::kMaps; ++p, words += range.out_rows * pitch) {
      if (at_.map + p >= range.maps) {
        break;
      }
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        if (col + 8 * n < params_.out_w) {
          if (row < range.out_rows) {
            words[4 * n] = Packed<T>::pack(sum_[p][n][0], sum_[p][n][1]);
          }
          if (row + 8 < range.out_rows) {
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
  const int odd_;        // 1 where the first input column is odd: loads begin one column earlier
  const int in_col_;     // of the first pair
  unsigned inside_ = 0;  // which pieces' pairs are inside the image
  ToeplitzFilter<kWidth, T> filter_[Shape::kMaps];
  const T* weight_[Shape::kMaps];
  float bias_[Shape::kMaps];
  float sum_[Shape::kMaps][kProducts][4];
  bool flip_;
};

}  // namespace ops::cuda
