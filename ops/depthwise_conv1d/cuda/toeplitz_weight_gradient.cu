// Weight gradient of toeplitz: implicit GEMM on matrix units, stages as in toeplitz.cu.
//
//      16 windows, 8 apart         shifted grad_output          128 sums for taps 8 i + j,
//      x[8 i + m]                  g[m − j]                     added up over all m
//      ┌────────────────┐          ┌───────────┐                ┌───────┐
//      │ 16 inputs      │    ×     │ 16 × 8    │          ──►   │ +=    │
//      └────────────────┘          └───────────┘                └───────┘
//
//   block:   8 channels (planes) or 32 (channels-last), 128 taps, a split of images and tiles
//   shared:  rows of inputs, rows of grad_output with the 8 elements before the tile
//   thread:  4 accumulators of each of its warp's rows, as many for the bias
//
// A product with ones instead of inputs gives the bias gradient. Padding is multiplied as zeros: if
// an input or gradient is non-finite, any tap of its channel may be NaN.
#include "depthwise_conv1d/cuda/stage.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kProductTaps = 128, kProductDepth = 16, kBefore = 8,
              kStep = 4;  // kStep: products at once

template <typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kStageThreads)
    toeplitz_weight_gradient_kernel(const WeightGradient<T> p, int tiles, int per_split) {
  using Shape = StageShape<kChannelsLast>;
  constexpr int kTile = Shape::kTile, kRowsPerWarp = Shape::kRowsPerWarp;
  constexpr int kInPitch = Shape::pitch(kTile + kProductTaps),
                kGradPitch = Shape::pitch(kTile + 2 * kBefore);
  extern __shared__ uint4 aligned_shared[];
  unsigned* const inputs = reinterpret_cast<unsigned*>(aligned_shared);
  unsigned* const grads = inputs + Shape::kBuffers * Shape::kRows * kInPitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Lane at;
  const int channels = p.c, in_t = p.in_t, out_t = p.out_t, padding = p.padding;
  const int first_channel = blockIdx.x * Shape::kRows, first_tap = blockIdx.z * kProductTaps;
  const int units = static_cast<int>(p.n) * tiles, first_unit = blockIdx.y * per_split;
  const int last_unit = min(units, first_unit + per_split);
  const int window =
      min(kProductTaps, round_up(static_cast<int>(p.taps) + kAligned - first_tap, kAligned));
  const bool add_bias = p.grad_bias && first_tap == 0;
  // Pairs of gradients 2 t − g: odd ones straddle two words.
  const int pair_of_grads = at.t - (at.g + 1) / 2 + kBefore / 2;
  const unsigned selector = at.g % 2 ? 0x5432 : 0x3210;

  float sum[kRowsPerWarp][4] = {}, bias[kRowsPerWarp][4] = {};
  int shift = 0;  // the same for all rows of a channel in a split
  const auto first_position = [&](int unit) {
    const int m0 = unit % tiles * kTile;
    const int channel = min(first_channel + warp, channels - 1);
    return kChannelsLast ? m0 : m0 - misalignment(p.grad.row(unit / tiles, channel), kAligned);
  };
  const auto stage = [&](int unit) {
    const int image = unit / tiles, m0 = first_position(unit);
    const int depth = min(kTile, round_up(out_t + kBefore - m0, kStep * kProductDepth));
    if constexpr (kChannelsLast) {
      const int channel = first_channel + octet() * 8;
      const bool exists = channel < channels;
      stage_channels(inputs, kInPitch, p.in.row(image, channel), p.in.t_stride,
                     m0 - padding + first_tap, depth + window, exists ? in_t : 0);
      stage_channels(grads, kGradPitch, p.grad.row(image, channel), p.grad.t_stride, m0 - kBefore,
                     depth + kBefore, exists ? out_t : 0);
    } else if (const int channel = first_channel + warp; channel < channels) {
      const T* const in = p.in.row(image, channel);
      const int row = warp * Shape::kBuffers + unit % Shape::kBuffers;
      shift = (misalignment(in, kAligned) + m0 - padding) & (kAligned - 1);
      stage_row(inputs + row * kInPitch, in, m0 - padding - shift + first_tap, depth + window,
                in_t);
      stage_row(grads + row * kGradPitch, p.grad.row(image, channel), m0 - kBefore, depth + kBefore,
                out_t);
    }
    commit_copies();
  };
  if (!kChannelsLast && first_unit < last_unit) {
    stage(first_unit);
  }
  for (int unit = first_unit; unit < last_unit; ++unit) {
    const int m0 = first_position(unit);
    if constexpr (kChannelsLast) {
      __syncthreads();  // the stage before has been read
      stage(unit);
      __syncthreads();
    } else {
      __syncwarp();
      if (unit + 1 < last_unit) {
        stage(unit + 1);
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncwarp();
    }
    const int depth = min(kTile, out_t + kBefore - m0);  // at most the tile
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const int row =
          kChannelsLast ? warp * kRowsPerWarp + r : warp * Shape::kBuffers + unit % Shape::kBuffers;
      const unsigned* x = inputs + row * kInPitch + lane;
      const unsigned* g = grads + row * kGradPitch + pair_of_grads;
      constexpr int kWords = kProductDepth / 2;
      unsigned low[2 * kStep], high[2 * kStep];  // windows 0 … 7, 8 … 15
#pragma unroll
      for (int i = 0; i < 2 * kStep; ++i) {
        low[i] = x[4 * i];
      }
#pragma unroll 1
      for (int m = 0; m < depth; m += kStep * kProductDepth) {
        x += kStep * kWords;
#pragma unroll
        for (int i = 0; i < 2 * kStep; ++i) {
          high[i] = x[4 * i];
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i, g += kWords) {
          const unsigned pairs[2] = {__byte_perm(g[0], g[1], selector),
                                     __byte_perm(g[4], g[5], selector)};
          Packed<T>::mma(sum[r], sum[r], low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1],
                         pairs);
          if (add_bias) {
            constexpr unsigned kOnes = Packed<T>::kOnes;
            Packed<T>::mma(bias[r], bias[r], kOnes, kOnes, kOnes, kOnes, pairs);
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kStep; ++i) {
          low[i] = high[i];
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int channel = first_channel + warp * kRowsPerWarp + r;
    if (channel >= channels) {
      break;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = first_tap - shift + 8 * at.g + 2 * at.t + i % 2 + i / 2 * 64;
      if (is_inside(k, static_cast<int>(p.taps))) {
        p.put(blockIdx.y, channel, k, sum[r][i]);
      }
    }
    if (add_bias && lane == 0) {
      p.put(blockIdx.y, channel, p.taps, bias[r][0]);
    }
  }
}

template <typename T, bool kChannelsLast>
bool launch(const WeightGradient<T>& p, const Run& run) {
  using Shape = StageShape<kChannelsLast>;
  constexpr int64_t kBlocksPerMultiprocessor = 10;
  constexpr int kShift = kChannelsLast ? 0 : kAligned - 1;
  const int64_t tiles = ceil_div(p.out_t + 7 + kShift, Shape::kTile), units = p.n * tiles;
  const int64_t channel_blocks = ceil_div(p.c, Shape::kRows);
  const int64_t tap_blocks = ceil_div(p.taps + kShift, kProductTaps);
  // Rows of different alignment have different shifts: a split has one image.
  const bool uniform =
      kChannelsLast || p.n == 1 || (p.in.n_stride % kAligned == 0 && p.c * p.out_t % kAligned == 0);
  const int64_t per_split =
      uniform ? share(units, channel_blocks * tap_blocks, kBlocksPerMultiprocessor) : tiles;
  const int64_t splits = ceil_div(units, per_split);
  if (units >= int64_t{1} << 30 || splits > kMaxGridY || tap_blocks > kMaxGridY) {
    return false;
  }
  const size_t bytes =
      sizeof(unsigned) * Shape::kBuffers * Shape::kRows *
      (Shape::pitch(Shape::kTile + kProductTaps) + Shape::pitch(Shape::kTile + 2 * kBefore));
  reduce_splits(p, run, splits, [&](const WeightGradient<T>& split) {
    launch_kernel(toeplitz_weight_gradient_kernel<T, kChannelsLast>,
                  dim3(channel_blocks, splits, tap_blocks), kStageThreads, bytes, run.stream, split,
                  static_cast<int>(tiles), static_cast<int>(per_split));
  });
  return true;
}

}  // namespace

template <typename T>
bool toeplitz_weight_gradient(const WeightGradient<T>& p, const Run& run) {
  if (!has_mma()) {
    return false;
  }
  return p.has_rows() ? launch<T, false>(p, run)
                      : has_vectors(p, {p.grad.data}) && launch<T, true>(p, run);
}

template bool toeplitz_weight_gradient(const WeightGradient<Half>&, const Run&);
template bool toeplitz_weight_gradient(const WeightGradient<BFloat16>&, const Run&);

}  // namespace ops::depthwise_conv1d
