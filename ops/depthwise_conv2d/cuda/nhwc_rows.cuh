// Work partition of nhwc_stream, and prefetching reads of NHWC rows.
#pragma once

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

// Reader of one thread's rows: kCols pixels × V channels, prefetched kPrefetch rows ahead.
//   2: cp.async to the thread's own ring of kRows rows in shared memory; needs no __syncthreads
//   1: to registers
//   0: no prefetch
template <int V, int kPrefetch, int kRows, int kCols, typename T>
class RowReader {
  using Position = StreamPosition<V>;
  using Bits = typename BitsOf<V * sizeof(T)>::type;

 public:
  static constexpr int kPrefetchRows = kPrefetch;
  static constexpr bool kRing = kPrefetchRows == 2;
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
    } else if constexpr (kPrefetchRows == 1) {
      load(position, prefetched_);
    }
  }

  // Read a row to x: from ring slot `row`, from the registers, or from `position`.
  __device__ void read(const T* position, int row, float (&x)[kCols][V]) const {
    if constexpr (kPrefetchRows == 1) {
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

// Commit a cp.async group.
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

}  // namespace ops::cuda
