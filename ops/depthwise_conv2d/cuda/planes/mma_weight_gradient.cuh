// Weight gradient of nchw_mma (implicit GEMM, see mma_tile.cuh for the operand layout).
//
//      16 rows of inputs,        8 rows of grad_output,      16 × 8 sums for filter column b,
//      columns shifted by b      transposed                  added up over all tiles
//      ┌────────────────┐        ┌───────────┐               ┌───────┐
//      │ 16 columns     │   ×    │ 16 columns│      ──►      │ +=    │  tap (a, b) = sum of the
//      └────────────────┘        └───────────┘               └───────┘  a-th diagonal
//
// A product with ones instead of inputs gives the bias gradient.
#pragma once

#include "depthwise_conv2d/cuda/planes/mma_tile.cuh"

namespace ops::cuda {

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
  static constexpr int kShift = 0;
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

}  // namespace ops::cuda
