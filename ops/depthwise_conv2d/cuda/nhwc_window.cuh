// How strips of channels-last images are marched along: what waits in registers, where a march
// begins, and how images are cut.
#pragma once

#include <algorithm>

#include "depthwise_conv2d/cuda/nhwc_rows.cuh"

namespace ops::cuda {

// What a march along Axis keeps in registers. One step takes kStepIn new rows of inputs, completes
// kStepOut rows of outputs, and touches kPending rows of outputs in all.
template <typename Axis>
struct March {
  static constexpr int kTaps = Axis::kTaps;
  static constexpr int kChannels = kTaps <= 3 ? 4 : 2;
  static constexpr int kCols = kTaps <= 3 ? 4 : (Axis::step(2) == 2 ? 7 : 4);
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kStepOut = Axis::step(2) == 1 ? 2 : 1;
  static constexpr int kStepIn = Axis::step(kStepOut);
  static constexpr int kWindow = Axis::inputs(kStepOut);

  // The tap between pending output row m and new input row r, or -1.
  static constexpr int tap(int m, int r) { return Axis::tap(m, kWindow - kStepIn + r); }

  static constexpr int pending() {
    int rows = 0;
    for (int m = 0; m < kTaps * 4; ++m) {
      for (int r = 0; r < kStepIn; ++r) {
        rows = tap(m, r) >= 0 ? m + 1 : rows;
      }
    }
    return round_up(rows, kStepOut);
  }
  static constexpr int kPending = pending();
  // Steps before the first one that completes rows of the strip.
  static constexpr int kWarmUp = kPending / kStepOut - 1;
  // Steps that are unrolled, so that fewer pending rows have to move.
  static constexpr int kPeriod = kTaps == 3 && Axis::step(2) == 2 ? 3 : 2;
  // Rows that are asked for before they are needed: see RowReader.
  template <typename T>
  static constexpr int kAhead = kTaps > 3                         ? 2
                                : sizeof(T) == 2 && kStepOut == 1 ? 1
                                                                  : 0;
  static constexpr int kBlocks = kTaps <= 5 ? 4 : 3;  // of kStripThreads on a multiprocessor
};

// The rows from kBy on move to the front.
template <int kBy, int kRows, int kCols, int V>
__device__ void move_rows(float (&rows)[kRows][kCols][V]) {
#pragma unroll
  for (int m = 0; m + kBy < kRows; ++m) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        rows[m][j][v] = rows[m + kBy][j][v];
      }
    }
  }
}

// Where a strip's march begins in an image and its rows.
template <typename Axis, typename M, typename Place>
struct MarchStart {
  int w0, in_w0;       // columns of the first output and the first input
  int h0;              // row of the first output
  int last_step;       // steps run from −kWarmUp to this one, exclusive
  int first_y, end_y;  // rows of inputs that they take

  __device__ MarchStart(const StripLaunch& launch, const Place& at)
      : w0((at.tile * blockDim.y + threadIdx.y) * M::kCols),
        in_w0(launch.start_w + Axis::step(w0)),
        h0(at.segment * launch.steps * M::kStepOut),
        last_step(min(launch.steps, (launch.out_h - h0 + M::kStepOut - 1) / M::kStepOut)),
        first_y(launch.start_h + Axis::step(h0) + M::kWindow - M::kStepIn -
                M::kWarmUp * M::kStepIn),
        end_y(min(launch.in_h, first_y + (last_step + M::kWarmUp) * M::kStepIn)) {}
};

// How to cut images into blocks.
struct StripPlan {
  StripLaunch launch;
  dim3 grid, block;
  bool aligned;  // pixels, as vectors are
};

template <typename Axis, typename M, typename T>
StripPlan plan_strips(int64_t images, int64_t channels, int64_t in_h, int64_t in_w, int64_t out_h,
                      int64_t out_w, int64_t padding_h, int64_t padding_w,
                      std::initializer_list<const void*> pointers) {
  constexpr int V = M::kChannels;
  StripLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w, launch.out_h = out_h, launch.out_w = out_w;
  launch.start_h = Axis::start(padding_h);
  launch.start_w = Axis::start(padding_w);
  launch.images = images;
  launch.channels = channels;
  // The strips of a row, and then more images, beside as many lanes as leave the fewest idle.
  const int64_t vectors = ceil_div(channels, V);
  const int64_t across = ceil_div(out_w, M::kCols);
  int64_t chunks = 0, least = 0;
  dim3 block;
  for (int64_t n = ceil_div(vectors, kMostLanes); n <= ceil_div(vectors, kMostLanes / 4); ++n) {
    const int lanes = ceil_div(vectors, n);
    const int64_t tiles = ceil_div(across, kStripThreads / lanes);
    const int groups = ceil_div(across, tiles);
    const int z = std::min<int64_t>({kStripThreads / (lanes * groups), 64, images});
    const int64_t warps =
        n * tiles * ceil_div(images, z) * ceil_div(static_cast<int64_t>(lanes) * groups * z, 32);
    if (chunks == 0 || warps < least) {
      chunks = n, least = warps, launch.tiles_w = tiles;
      block = dim3(lanes, groups, z);
    }
  }
  // Long segments read few rows twice, but blocks of them may fill the device badly.
  const int64_t all_steps = ceil_div(out_h, M::kStepOut);
  const int64_t blocks = ceil_div(images, block.z) * launch.tiles_w * chunks;
  const int warps = ceil_div(block.x * block.y * block.z, 32);
  const int at_a_time = M::kBlocks * kStripThreads / 32 / warps * Device().multiprocessors;
  launch.segments = best_split(all_steps, blocks, at_a_time, M::kWarmUp + 2);
  launch.steps = ceil_div(all_steps, launch.segments);
  launch.segments = ceil_div(all_steps, launch.steps);
  return {launch, dim3(ceil_div(images, block.z) * launch.tiles_w * launch.segments, chunks), block,
          channels % V == 0 && are_aligned(pointers, V * sizeof(T))};
}

}  // namespace ops::cuda
