// nhwc_stream: work partition, prefetching row reader, register shapes and launch plan.
#pragma once

#include <algorithm>

#include "depthwise_conv2d/cuda/tap_maps.cuh"

namespace ops::cuda {

// A block has (lanes, groups, images) threads: lanes for adjacent channels, groups for adjacent
// column tiles. It streams down one segment of rows of its images.
struct StreamParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // input coordinates of the first output's window
  int tiles_w;           // blocks across an image
  int segments;          // blocks down an image
  int steps;             // per segment, of kStepOut output rows
  int images;
  int channels;
};

constexpr int kStreamThreads = 128;
constexpr int kMaxLanes = 32;
constexpr int kMaxPrefetchRows = 2;
constexpr int kRingRows = kMaxPrefetchRows + 1;

// A thread's column tile and its V channels, which must be aligned for vectorised access.
template <int V>
struct StreamPosition {
  int tile, segment;
  int64_t n;
  int first_channel;  // of the block
  int channel;        // of the thread
  int channels;       // of the image
  bool valid;

  __device__ explicit StreamPosition(const StreamParams& params)
      : tile(blockIdx.x % params.tiles_w),
        segment(blockIdx.x / params.tiles_w % params.segments),
        n(static_cast<int64_t>(blockIdx.x) / params.tiles_w / params.segments * blockDim.z +
          threadIdx.z),
        first_channel(blockIdx.y * blockDim.x * V),
        channel(first_channel + threadIdx.x * V),
        channels(params.channels),
        valid(n < params.images && channel < channels) {}

  // Return a mask with bit i set if column first + i is inside the image.
  template <int kCols>
  static __device__ unsigned column_mask(int first, int width) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      bits |= static_cast<unsigned>(first + i) < static_cast<unsigned>(width) ? 1u << i : 0u;
    }
    return bits;
  }
};

// Reader of one thread's rows: kCols pixels × V channels, prefetched kRowsAhead rows ahead.
//   2: cp.async to the thread's own ring of kRows rows in shared memory; needs no __syncthreads
//   1: to registers
//   0: no prefetch
template <int V, int kRowsAhead, int kRows, int kCols, typename T>
class RowReader {
  using Position = StreamPosition<V>;
  using Bits = typename BitsOf<V * sizeof(T)>::type;

 public:
  static constexpr int kPrefetch = kRowsAhead;
  static constexpr bool kRing = kPrefetch == 2;
  static_assert(!kRing || sizeof(Bits) >= 4, "what can be copied asynchronously");
  // Shared memory per block.
  static constexpr size_t kBytes = kRing ? kRows * kCols * sizeof(Bits) * kStreamThreads : 0;

  // Columns outside column_mask read as zero.
  __device__ RowReader(const Position& at, unsigned char* memory, unsigned column_mask)
      : at_(at), column_mask_(column_mask) {
    if constexpr (kRing) {
      ring_ = reinterpret_cast<Bits*>(memory) + flat_thread();
      for (int i = 0; i < kRows * kCols; ++i) {
        ring_[i * kStreamThreads] = {};
      }
    }
  }

  // Start to prefetch a row to ring slot `row`. `position`: address of the thread's first channel.
  __device__ void fetch(const T* position, int row) {
    if constexpr (kRing) {
#pragma unroll
      for (int i = 0; i < kCols; ++i, position += at_.channels) {
        if (column_mask_ & 1u << i) {
#if __CUDA_ARCH__ >= 800
          const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(slot(row, i)));
          asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(position),
                       "n"(sizeof(Bits))
                       : "memory");
#else
          *slot(row, i) = *reinterpret_cast<const Bits*>(position);
#endif
        }
      }
    } else if constexpr (kPrefetch == 1) {
      load(position, prefetched_);
    }
  }

  // Read a row to x: from ring slot `row`, from the registers, or from `position`.
  __device__ void read(const T* position, int row, float (&x)[kCols][V]) const {
    if constexpr (kPrefetch == 1) {
      widen<T>(prefetched_, x);
    } else {
      Bits bits[kCols];
      if constexpr (kRing) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          bits[i] = *slot(row, i);
        }
      } else {
        load(position, bits);
      }
      widen<T>(bits, x);
    }
  }

 private:
  const Position& at_;
  unsigned column_mask_;
  Bits* ring_;
  Bits prefetched_[kCols];

  __device__ void load(const T* position, Bits (&bits)[kCols]) const {
#pragma unroll
    for (int i = 0; i < kCols; ++i, position += at_.channels) {
      bits[i] = {};
      if (column_mask_ & 1u << i) {
        bits[i] = *reinterpret_cast<const Bits*>(position);
      }
    }
  }
  __device__ Bits* slot(int row, int i) const { return ring_ + (row * kCols + i) * kStreamThreads; }
};

__device__ inline void commit_row() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for all groups but the newest kMaxPrefetchRows − 1.
__device__ inline void wait_for_row() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kMaxPrefetchRows - 1) : "memory");
#endif
}

// Register shape of a stream along Axis. One step reads kStepIn input rows, accumulates in kPending
// output rows, and completes kStepOut of them.
template <typename Axis>
struct StreamShape {
  static constexpr int kTaps = Axis::kTaps;
  static constexpr int kChannels = kTaps <= 3 ? 4 : 2;
  static constexpr int kCols = kTaps <= 3 ? 4 : (Axis::step(2) == 2 ? 7 : 4);
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kStepOut = Axis::step(2) == 1 ? 2 : 1;
  static constexpr int kStepIn = Axis::step(kStepOut);
  static constexpr int kWindow = Axis::inputs(kStepOut);

  // Return the tap with which pending output row m reads new input row r, or −1.
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
  // Steps before the first one that completes output rows.
  static constexpr int kWarmUp = kPending / kStepOut - 1;
  // Unrolled steps, after which pending rows are shifted once.
  static constexpr int kPeriod = kTaps == 3 && Axis::step(2) == 2 ? 3 : 2;
  // Prefetch distance of RowReader.
  template <typename T>
  static constexpr int kPrefetch = kTaps > 3                         ? 2
                                   : sizeof(T) == 2 && kStepOut == 1 ? 1
                                                                     : 0;
  static constexpr int kBlocks = kTaps <= 5 ? 4 : 3;  // per SM
};

// Shift rows kBy … to the front.
template <int kBy, int kRows, int kCols, int V>
__device__ void shift_rows(float (&rows)[kRows][kCols][V]) {
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

// Start and end of a thread's stream.
template <typename Axis, typename Shape, typename Position>
struct StreamStart {
  int w0, in_w0;       // first output column, first input column
  int h0;              // first output row
  int last_step;       // exclusive; the first step is −kWarmUp
  int first_y, end_y;  // input rows [first_y, end_y)

  __device__ StreamStart(const StreamParams& params, const Position& at)
      : w0((at.tile * blockDim.y + threadIdx.y) * Shape::kCols),
        in_w0(params.start_w + Axis::step(w0)),
        h0(at.segment * params.steps * Shape::kStepOut),
        last_step(min(params.steps, (params.out_h - h0 + Shape::kStepOut - 1) / Shape::kStepOut)),
        first_y(params.start_h + Axis::step(h0) + Shape::kWindow - Shape::kStepIn -
                Shape::kWarmUp * Shape::kStepIn),
        end_y(min(params.in_h, first_y + (last_step + Shape::kWarmUp) * Shape::kStepIn)) {}
};

struct StreamPlan {
  StreamParams params;
  dim3 grid, block;
  bool aligned;  // for vectors of V channels
};

// Partition the images into blocks.
template <typename Axis, typename Shape, typename T>
StreamPlan plan_stream(int64_t images, int64_t channels, int64_t in_h, int64_t in_w, int64_t out_h,
                       int64_t out_w, int64_t padding_h, int64_t padding_w,
                       std::initializer_list<const void*> pointers) {
  constexpr int V = Shape::kChannels;
  StreamParams params{};
  params.in_h = in_h, params.in_w = in_w, params.out_h = out_h, params.out_w = out_w;
  params.start_h = Axis::start(padding_h);
  params.start_w = Axis::start(padding_w);
  params.images = images;
  params.channels = channels;
  // Choose the lanes that need the fewest warps; fill the block with column tiles, then images.
  const int64_t vectors = ceil_div(channels, V);
  const int64_t across = ceil_div(out_w, Shape::kCols);
  int64_t chunks = 0, min_warps = 0;
  dim3 block;
  for (int64_t n = ceil_div(vectors, kMaxLanes); n <= ceil_div(vectors, kMaxLanes / 4); ++n) {
    const int lanes = ceil_div(vectors, n);
    const int64_t tiles = ceil_div(across, kStreamThreads / lanes);
    const int groups = ceil_div(across, tiles);
    const int z = std::min<int64_t>({kStreamThreads / (lanes * groups), 64, images});
    const int64_t warps =
        n * tiles * ceil_div(images, z) * ceil_div(static_cast<int64_t>(lanes) * groups * z, 32);
    if (chunks == 0 || warps < min_warps) {
      chunks = n, min_warps = warps, params.tiles_w = tiles;
      block = dim3(lanes, groups, z);
    }
  }
  // Segments: long ones repeat fewer warm-up steps, short ones fill the device better.
  const int64_t all_steps = ceil_div(out_h, Shape::kStepOut);
  const int64_t blocks = ceil_div(images, block.z) * params.tiles_w * chunks;
  const int warps = ceil_div(block.x * block.y * block.z, 32);
  const int resident_blocks =
      Shape::kBlocks * kStreamThreads / 32 / warps * Device().multiprocessors;
  params.segments = best_split(all_steps, blocks, resident_blocks, Shape::kWarmUp + 2);
  params.steps = ceil_div(all_steps, params.segments);
  params.segments = ceil_div(all_steps, params.steps);
  return {params, dim3(ceil_div(images, block.z) * params.tiles_w * params.segments, chunks), block,
          channels % V == 0 && are_aligned(pointers, V * sizeof(T))};
}

}  // namespace ops::cuda
