// planes: [N, C, T], stride 1, dilation 1. Accumulates in float32.
//
// Convolution (float32)
//   block:   8 rows; a warp takes tiles of 512 outputs of one row, and loads the next one at the
//            same time
//   shared:  rows of inputs (two tiles) and filters in whole groups of 4 taps
//   thread:  8 adjacent outputs at a time; a window of inputs slides by a group of taps
//
//   inputs   │0 1 2 3│4 5 6 7│8 9 …     loads are aligned: `shift` zeros lead the filter
//   filter        │0 a b c│d 0 0 0│
//   outputs         │0 1 2 3│           stores are aligned: the first tile may begin before t = 0
//
// Weight gradient
//   block:   a split of a channel's rows
//   thread:  8 adjacent taps; adjacent threads have adjacent taps, then adjacent tiles of 8 outputs
#include "depthwise_conv1d/cuda/stage.cuh"

namespace ops::depthwise_conv1d {
namespace {

constexpr int kRowTile = 512;

__global__ void __launch_bounds__(kStageThreads)
    planes_kernel(const Convolution<float> p, int groups, int pitch, int tiles) {
  extern __shared__ float4 staged[];  // per row two tiles, then the filter
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = pitch / kGroup;
  const unsigned channels = p.c, row = blockIdx.x * kWarps + warp;
  if (row >= static_cast<unsigned>(p.n * p.c)) {
    return;
  }
  const unsigned image = row / channels, channel = row - image * channels;
  float4* const inputs = staged + warp * (2 * vectors + groups);
  float* const filter = reinterpret_cast<float*>(inputs + 2 * vectors);
  const float* const in = p.in.row(image, channel);
  float* const out = p.out.row(image, channel);
  const float* const grad = p.grad ? p.grad + (out - p.out.data) : nullptr;
  const int out_t = p.out_t, taps = p.taps, out_shift = misalignment(out, kGroup);
  const int start = -out_shift - static_cast<int>(p.padding);
  const int shift = (misalignment(in, kGroup) + start) & (kGroup - 1);
  const auto stage = [&](int tile) {
    const int outputs = round_up(out_t + out_shift - tile * kRowTile, 2 * kGroup);
    stage_row(reinterpret_cast<float*>(inputs + tile % 2 * vectors), in,
              tile * kRowTile + start - shift, pitch - kRowTile + min(kRowTile, outputs),
              static_cast<int>(p.in_t), swizzled);
    commit_copies();
  };
  const int first_tile = blockIdx.y * tiles;
  const int last_tile = min(first_tile + tiles, (out_t + out_shift + kRowTile - 1) / kRowTile);
  stage(first_tile);
  for (int i = lane; i < groups * kGroup; i += 32) {
    const bool is_tap = is_inside(i - shift, taps);
    filter[i] = is_tap ? p.weight[channel * p.taps + p.tap(i - shift)] : 0.0f;
  }
  const float bias = p.bias_of(channel);
  for (int tile = first_tile; tile < last_tile; ++tile) {
    if (tile + 1 < last_tile) {
      stage(tile + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncwarp();
    const int t0 = tile * kRowTile - out_shift;
    for (int first = 0; first < kRowTile && t0 + first < out_t; first += kTileOutputs) {
      const float4* const x = inputs + tile % 2 * vectors;
      const int vector = (first + lane * kOutputs) / kGroup, t = t0 + first + lane * kOutputs;
      float sum[kOutputs];
      convolve_window(reinterpret_cast<const float4*>(filter), groups, bias, sum,
                      [&](int i) { return x[swizzled(vector + i)]; });
#pragma unroll
      for (int r = 0; r < kOutputs; ++r) {
        const bool reads = grad && is_inside(t + r, out_t);
        sum[r] =
            p.activate(p.without_nan(sum[r], image, channel, t + r), reads ? grad[t + r] : 0.0f);
      }
#pragma unroll
      for (int half = 0; half < kOutputs; half += kGroup) {
        store(out, t + half, out_t, reinterpret_cast<const float (&)[kGroup]>(sum[half]));
      }
    }
    __syncwarp();
  }
}

constexpr int kGradientThreads = 256, kGroupTaps = 8, kSteps = 8, kMaxTapGroups = 32;

template <typename T>
__global__ void __launch_bounds__(kGradientThreads)
    planes_weight_gradient_kernel(const WeightGradient<T> p, int groups, const Tiles tiles) {
  extern __shared__ float shared[];
  const int channel = blockIdx.x, split = blockIdx.y;
  const int first_tap = blockIdx.z * groups * kGroupTaps;
  const int group = threadIdx.x % groups, lane = threadIdx.x / groups;
  const int lanes = kGradientThreads / groups;
  const int in_t = p.in_t, out_t = p.out_t, padding = p.padding;
  const int first_tile = split * tiles.per_split;
  const int last_tile = lane < lanes ? min(tiles.count, first_tile + tiles.per_split) : 0;
  const auto shift_of = [&](int image) {  // the same for all rows of a split
    return (misalignment(p.in.row(image, channel), kGroup) -
            misalignment(p.grad.row(image, channel), kGroup) - padding) &
           (kGroup - 1);
  };
  const int shift = shift_of(tiles.image_of(first_tile));
  float sum[kGroupTaps + 1][1] = {};
  for (int tile = first_tile + lane; tile < last_tile; tile += lanes) {
    const int image = tiles.image_of(tile);
    const T* const in = p.in.row(image, channel);
    const T* const grad = p.grad.row(image, channel);
    const int t = (tile - image * tiles.per_row) * kSteps - misalignment(grad, kGroup);
    const int at = t - padding - shift + first_tap + group * kGroupTaps;
    float g[kSteps], x[kSteps + kGroupTaps];
    if (t >= 0 && t + kSteps <= out_t && at >= 0 && at + kSteps + kGroupTaps <= in_t) {
      load<true, kSteps>(grad, t, out_t, g);
      load<true, kSteps + kGroupTaps>(in, at, in_t, x);
    } else {
      load<false, kSteps>(grad, t, out_t, g);
      load<false, kSteps + kGroupTaps>(in, at, in_t, x);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kGroupTaps; ++j) {
        sum[j][0] += g[i] * x[i + j];
      }
      sum[kGroupTaps][0] += g[i];
    }
  }
  reduce_block(sum, shared, group, groups, lane, lanes);
  for (int i = threadIdx.x; i < groups * kGroupTaps; i += kGradientThreads) {
    const int k = first_tap + i - shift;
    if (is_inside(k, static_cast<int>(p.taps))) {
      p.put(split, channel, k, shared[i / kGroupTaps * (kGroupTaps + 1) + i % kGroupTaps]);
    }
  }
  if (p.grad_bias && threadIdx.x == 0 && first_tap == 0) {
    p.put(split, channel, p.taps, shared[kGroupTaps]);
  }
}

}  // namespace

bool planes(const Convolution<float>& p, const Run& run) {
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const int64_t groups = ceil_div(p.taps + kGroup - 1, kGroup);
  const int64_t pitch = kRowTile + ceil_div(groups, 2) * 2 * kGroup;  // whole pairs of vectors
  const size_t bytes = kWarps * (2 * pitch + groups * kGroup) * sizeof(float);
  const int64_t tiles = ceil_div(p.out_t + kGroup - 1, kRowTile);
  const int64_t blocks = ceil_div(p.n * p.c, kWarps);
  const int64_t length = share(tiles, blocks, kBlocksPerMultiprocessor);
  if (!p.has_rows() || bytes > Device().block_shared || ceil_div(tiles, length) > kMaxGridY) {
    return false;
  }
  launch_kernel(planes_kernel, dim3(blocks, ceil_div(tiles, length)), kStageThreads, bytes,
                run.stream, p, static_cast<int>(groups), static_cast<int>(pitch),
                static_cast<int>(length));
  return true;
}

template <typename T>
bool planes_weight_gradient(const WeightGradient<T>& p, const Run& run) {
  const int64_t all_groups = ceil_div(p.taps + kGroup - 1, kGroupTaps);
  const int64_t tap_blocks = ceil_div(all_groups, kMaxTapGroups);
  const int64_t groups = ceil_div(all_groups, tap_blocks), lanes = kGradientThreads / groups;
  const size_t bytes = reduction_elements(groups, lanes, kGroupTaps + 1) * sizeof(float);
  const int64_t resident =
      resident_blocks(planes_weight_gradient_kernel<T>, kGradientThreads, bytes);
  Tiles tiles =
      split_tiles(p.n, 0, p.out_t + kGroup, kSteps, false, p.c * tap_blocks, lanes, resident);
  if (p.n > 1 && (p.in.n_stride % kGroup != 0 || p.grad.n_stride % kGroup != 0)) {
    // Rows are not equally aligned: a split has one.
    tiles.per_split = tiles.per_row, tiles.splits = static_cast<int>(p.n);
  }
  if (!p.has_rows() || tiles.splits > kMaxGridY || tap_blocks > kMaxGridY) {
    return false;
  }
  reduce_splits(p, run, tiles.splits, [&](const WeightGradient<T>& split) {
    launch_kernel(planes_weight_gradient_kernel<T>, dim3(p.c, tiles.splits, tap_blocks),
                  kGradientThreads, bytes, run.stream, split, static_cast<int>(groups), tiles);
  });
  return true;
}

template bool planes_weight_gradient(const WeightGradient<float>&, const Run&);
template bool planes_weight_gradient(const WeightGradient<BFloat16>&, const Run&);
template bool planes_weight_gradient(const WeightGradient<Half>&, const Run&);

}  // namespace ops::depthwise_conv1d
