// Weight gradients of the mma families: see mma_tile.cuh.
#pragma once

#include "depthwise_conv2d/cuda/mma_tile.cuh"

namespace ops::cuda {

// Gradients of a filter and its bias, as a warp sums them up. 8 rows of inputs and more times as
// many rows of grad_output, one a few columns along the other, give a matrix whose diagonals are
// taps of a filter's column.
template <int kWidth, typename T>
class DiagonalSums {
 public:
  static constexpr int kTaps = kWidth * kWidth;
  static constexpr int kRows = 8;  // of grad_output
  // 1 where the padding that keeps an image's size is odd: loads then begin a column earlier, at an
  // even one.
  static constexpr int kOdd = (kWidth - 1) / 2 % 2;
  // Words from which a lane takes the pairs of all columns of a filter.
  static constexpr int kWords = (kOdd + kWidth - 1) / 2 + 1 + kOdd;
  static_assert(kRows + kWidth <= 16, "the window of a product's rows");

  // Floats of shared memory for the sums of so many warps.
  static constexpr size_t floats(int warps) {
    return static_cast<size_t>(warps) * kMatrices * kMatrix;
  }

  // in: words of row g of the window, of row g + 8, and of both those 8 columns on.
  __device__ void add(const unsigned (&in)[4][kWords], const unsigned (&grad)[2]) {
#pragma unroll
    for (int b = 0; b < kWidth; ++b) {
      Packed<T>::multiply(sum_[b], sum_[b], pair(in[0], b), pair(in[1], b), pair(in[2], b),
                          pair(in[3], b), grad);
    }
    constexpr unsigned kOnes = Packed<T>::kOnes;
    Packed<T>::multiply(sum_[kWidth], sum_[kWidth], kOnes, kOnes, kOnes, kOnes, grad);
  }

  // The sums of a warp, in the place of so many before them, and then, when the threads have
  // synchronised, put(i, sum) those of `tiles` warps for each of `channels` channels.
  __device__ void leave(float* shared, int before) const {
    const Lane lane;
    float* mine = shared + floats(before);
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mine[i * kMatrix + (lane.g + j / 2 * 8) * 8 + 2 * lane.t + j % 2] = sum_[i][j];
      }
    }
  }
  template <typename Put>
  __device__ static void add_up(const float* shared, int tiles, int channels, const Put& put) {
    add_lanes(channels * (kTaps + 1), put, [&](int i, int lane) {
      const int tap = i % (kTaps + 1);
      const int matrix = tap < kTaps ? tap % kWidth : kWidth;
      const int row = tap < kTaps ? lane + tap / kWidth : 0;
      const float* tile = shared + (i / (kTaps + 1) * tiles * kMatrices + matrix) * kMatrix;
      float sum = 0;
      for (int t = 0; t < tiles; ++t, tile += kMatrices * kMatrix) {
        sum += tile[row * 8 + lane];
      }
      return sum;
    });
  }

 private:
  static constexpr int kMatrices = kWidth + 1, kMatrix = 16 * 8;

  float sum_[kMatrices][4] = {};  // a filter's columns, and grad_output itself

  // The inputs that two neighbouring outputs join with column b of the filter.
  static __device__ unsigned pair(const unsigned (&words)[kWords], int b) {
    const int first = kOdd + b;
    return first % 2 ? __byte_perm(words[first / 2], words[first / 2 + 1], 0x5432)
                     : words[first / 2];
  }
};

// 8 rows of outputs, as long as they are.
struct MmaWeightShape {
  static constexpr int kRows = 8, kCols = 1 << 20;
  static constexpr int kMaps = 1;
  static constexpr int kThreads = 32;
  static constexpr int kThreadsPerBlock = 256;
  static constexpr int kThreadsPerSm = 512;
};

// A tile's part of them, of contiguous images.
template <typename SumsAxis, typename Element>
class MmaWeightTile {
 public:
  using Axis = SumsAxis;
  using T = Element;
  using Shape = MmaWeightShape;
  using Diagonals = DiagonalSums<Axis::kTaps, T>;
  static constexpr int kTaps = Diagonals::kTaps, kOdd = Diagonals::kOdd;
  static_assert(Axis::step(1) == 1);

  // Floats of shared memory for `total`.
  static size_t floats(int threads) { return Diagonals::floats(threads / 32); }

  __device__ explicit MmaWeightTile(const NchwParams& params) : params_(params), at_(params) {}

  __device__ int map() const { return at_.map; }

  // `maps` and `grads`: where those of the range lie in `shared`.
  __device__ void add(const T* shared, int /*zeros*/, int maps, int grads,
                      const StageRange& range) {
    const int in_pitch = params_.in_w / 2, out_pitch = params_.out_w / 2;  // in words
    const int row = at_.row + lane_.g;
    const unsigned* grad = reinterpret_cast<const unsigned*>(shared + grads) +
                           (at_.map * range.out_rows + row) * out_pitch + lane_.t;
    const int y = params_.start_h + range.out_row + row;
    int in_col = params_.start_w - kOdd + 2 * lane_.t;
    const unsigned* upper = reinterpret_cast<const unsigned*>(shared + maps) + in_col / 2 +
                            (at_.map * range.in_rows + y - range.in_row) * in_pitch;
    const unsigned* lower = upper + 8 * in_pitch;
    // Widths of rows, none of those outside of the image.
    const unsigned upper_w = params_.has_in_row(y) ? params_.in_w : 0;
    const unsigned lower_w =
        params_.has_in_row(y + 8) && lane_.g < Axis::kTaps - 1 ? params_.in_w : 0;
    const int out_w = row < range.out_rows ? params_.out_w : 0;
#pragma unroll 1
    for (int col = 2 * lane_.t, products = (params_.out_w + 15) / 16; products > 0; --products) {
      const unsigned g[2] = {col < out_w ? grad[0] : 0, col + 8 < out_w ? grad[4] : 0};
      unsigned in[4][Diagonals::kWords];
#pragma unroll
      for (int j = 0; j < Diagonals::kWords; ++j) {
        const unsigned left = in_col + 2 * j, right = left + 8;
        in[0][j] = left < upper_w ? upper[j] : 0;
        in[1][j] = left < lower_w ? lower[j] : 0;
        in[2][j] = right < upper_w ? upper[4 + j] : 0;
        in[3][j] = right < lower_w ? lower[4 + j] : 0;
      }
      sums_.add(in, g);
      col += 16, in_col += 16, upper += 8, lower += 8, grad += 8;
    }
  }

  // put(i, sum) the sums of all tiles of each of `channels` maps.
  template <typename Put>
  __device__ void total(float* shared, int channels, const Put& put) const {
    sums_.leave(shared, threadIdx.x / 32);
    __syncthreads();
    Diagonals::add_up(shared, params_.across * params_.down, channels, put);
  }

 private:
  const NchwParams& params_;
  const Lane lane_;
  const MmaPosition<Shape> at_;
  Diagonals sums_;
};

}  // namespace ops::cuda
