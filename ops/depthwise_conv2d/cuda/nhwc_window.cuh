// Plan of nhwc_stream: what waits in registers, where a stream begins, and how images are cut.
#pragma once

#include <algorithm>

#include "depthwise_conv2d/cuda/nhwc_rows.cuh"

namespace ops::cuda {

// Registers of a stream along Axis. One step takes kStepIn new rows of inputs, completes
// kStepOut rows of outputs, and touches kPending rows of outputs in all.
template <typename Axis>
struct StreamShape {
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
  // Steps before the first one that completes rows of the column tile.
  static constexpr int kWarmUp = kPending / kStepOut - 1;
  // Steps that are unrolled, so that fewer pending rows have to move.
  static constexpr int kPeriod = kTaps == 3 && Axis::step(2) == 2 ? 3 : 2;
  // Rows that are asked for before they are needed: see RowReader.
  template <typename T>
  static constexpr int kAhead = kTaps > 3                         ? 2
                                : sizeof(T) == 2 && kStepOut == 1 ? 1
                                                                  : 0;
  static constexpr int kBlocks = kTaps <= 5 ? 4 : 3;  // of kStreamThreads on a multiprocessor
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

// First row and column of a column tile's stream.
template <typename Axis, typename M, typename Place>
struct StreamStart {
  int w0, in_w0;       // columns of the first output and the first input
  int h0;              // row of the first output
  int last_step;       // steps run from −kWarmUp to this one, exclusive
  int first_y, end_y;  // rows of inputs that they take

  __device__ StreamStart(const StreamParams& params, const Place& at)
      : w0((at.tile * blockDim.y + threadIdx.y) * M::kCols),
        in_w0(params.start_w + Axis::step(w0)),
        h0(at.segment * params.steps * M::kStepOut),
        last_step(min(params.steps, (params.out_h - h0 + M::kStepOut - 1) / M::kStepOut)),
        first_y(params.start_h + Axis::step(h0) + M::kWindow - M::kStepIn -
                M::kWarmUp * M::kStepIn),
        end_y(min(params.in_h, first_y + (last_step + M::kWarmUp) * M::kStepIn)) {}
};

// How to cut images into blocks.
struct StreamPlan {
  StreamParams params;
  dim3 grid, block;
  bool aligned;  // positions, as vectors are
};

template <typename Axis, typename M, typename T>
StreamPlan plan_stream(int64_t images, int64_t channels, int64_t in_h, int64_t in_w, int64_t out_h,
                       int64_t out_w, int64_t padding_h, int64_t padding_w,
                       std::initializer_list<const void*> pointers) {
  constexpr int V = M::kChannels;
  StreamParams params{};
  params.in_h = in_h, params.in_w = in_w, params.out_h = out_h, params.out_w = out_w;
  params.start_h = Axis::start(padding_h);
  params.start_w = Axis::start(padding_w);
  params.images = images;
  params.channels = channels;
  // The column tiles of a row, and then more images, beside as many lanes as leave the fewest idle.
  const int64_t vectors = ceil_div(channels, V);
  const int64_t across = ceil_div(out_w, M::kCols);
  int64_t chunks = 0, least = 0;
  dim3 block;
  for (int64_t n = ceil_div(vectors, kMaxLanes); n <= ceil_div(vectors, kMaxLanes / 4); ++n) {
    const int lanes = ceil_div(vectors, n);
    const int64_t tiles = ceil_div(across, kStreamThreads / lanes);
    const int groups = ceil_div(across, tiles);
    const int z = std::min<int64_t>({kStreamThreads / (lanes * groups), 64, images});
    const int64_t warps =
        n * tiles * ceil_div(images, z) * ceil_div(static_cast<int64_t>(lanes) * groups * z, 32);
    if (chunks == 0 || warps < least) {
      chunks = n, least = warps, params.tiles_w = tiles;
      block = dim3(lanes, groups, z);
    }
  }
  // Long segments read few rows twice, but blocks of them may fill the device badly.
  const int64_t all_steps = ceil_div(out_h, M::kStepOut);
  const int64_t blocks = ceil_div(images, block.z) * params.tiles_w * chunks;
  const int warps = ceil_div(block.x * block.y * block.z, 32);
  const int resident_blocks = M::kBlocks * kStreamThreads / 32 / warps * Device().multiprocessors;
  params.segments = best_split(all_steps, blocks, resident_blocks, M::kWarmUp + 2);
  params.steps = ceil_div(all_steps, params.segments);
  params.segments = ceil_div(all_steps, params.steps);
  return {params, dim3(ceil_div(images, block.z) * params.tiles_w * params.segments, chunks), block,
          channels % V == 0 && are_aligned(pointers, V * sizeof(T))};
}

}  // namespace ops::cuda
