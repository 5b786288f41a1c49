// How threads go through channels-last images, and how they read them.
#pragma once

#include "depthwise_conv2d/cuda/tap_maps.cuh"

namespace ops::cuda {

// A block has lanes × groups × images threads: the lanes' channels lie side by side, and so do the
// groups' column tiles. It streams down one segment of its images.
struct StreamParams {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // image coordinate of the first output's first input
  int tiles_w;           // blocks across an image
  int segments;          // blocks down an image
  int steps;             // a segment's length, in groups of output rows that complete together
  int images;
  int channels;
};

constexpr int kStreamThreads = 128;
constexpr int kMaxLanes = 32;
constexpr int kMostAhead = 2;  // rows
constexpr int kRingRows = kMostAhead + 1;

// The V channels of a column tile that a thread owns. A position's move at once, which takes
// aligned positions.
template <int V>
struct StreamPosition {
  int tile, segment;
  int64_t n;
  int first_channel;  // the block's
  int channel;
  int channels;  // of the image
  bool present;

  __device__ explicit StreamPosition(const StreamParams& params)
      : tile(blockIdx.x % params.tiles_w),
        segment(blockIdx.x / params.tiles_w % params.segments),
        n(static_cast<int64_t>(blockIdx.x) / params.tiles_w / params.segments * blockDim.z +
          threadIdx.z),
        first_channel(blockIdx.y * blockDim.x * V),
        channel(first_channel + threadIdx.x * V),
        channels(params.channels),
        present(n < params.images && channel < channels) {}

  // Which of kCols columns from `first` on are inside an image, a bit each.
  template <int kCols>
  static __device__ unsigned columns(int first, int width) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      bits |= static_cast<unsigned>(first + i) < static_cast<unsigned>(width) ? 1u << i : 0u;
    }
    return bits;
  }
};

// Reads a column tile's rows, kCols positions each, for one thread, which asks for them kAhead rows
// before they are needed. Two ahead, the thread has its own copies of kRows rows on their way into
// shared memory; no other thread reads them, so none has to wait for another. One ahead is held in
// registers, where they suffice. None ahead, rows come when they are read.
template <int V, int kRowsAhead, int kRows, int kCols, typename T>
class RowReader {
  using Place = StreamPosition<V>;
  using Bits = typename BitsOf<V * sizeof(T)>::type;

 public:
  static constexpr int kAhead = kRowsAhead;
  static constexpr bool kRing = kAhead == 2;
  static_assert(!kRing || sizeof(Bits) >= 4, "what can be copied asynchronously");
  // Shared memory of a block.
  static constexpr size_t kBytes = kRing ? kRows * kCols * sizeof(Bits) * kStreamThreads : 0;

  // `columns` are those of the column tile that are inside the image; the others are zero.
  __device__ RowReader(const Place& at, unsigned char* memory, unsigned columns)
      : at_(at), columns_(columns) {
    if constexpr (kRing) {
      ring_ = reinterpret_cast<Bits*>(memory) + flat_thread();
      for (int i = 0; i < kRows * kCols; ++i) {
        ring_[i * kStreamThreads] = {};
      }
    }
  }

  // Begins to read the row that starts at `position`, the thread's first channel of it.
  __device__ void fetch(const T* position, int row) {
    if constexpr (kRing) {
#pragma unroll
      for (int i = 0; i < kCols; ++i, position += at_.channels) {
        if (columns_ & 1u << i) {
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
    } else if constexpr (kAhead == 1) {
      load(position, held_);
    }
  }

  // x = the row, which starts at `position`; of rows that are held the one that was asked for last.
  __device__ void read(const T* position, int row, float (&x)[kCols][V]) const {
    if constexpr (kAhead == 1) {
      widen<T>(held_, x);
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
  const Place& at_;
  unsigned columns_;
  Bits* ring_;
  Bits held_[kCols];

  __device__ void load(const T* position, Bits (&bits)[kCols]) const {
#pragma unroll
    for (int i = 0; i < kCols; ++i, position += at_.channels) {
      bits[i] = {};
      if (columns_ & 1u << i) {
        bits[i] = *reinterpret_cast<const Bits*>(position);
      }
    }
  }
  __device__ Bits* slot(int row, int i) const { return ring_ + (row * kCols + i) * kStreamThreads; }
};

// Ends a group of fetches.
__device__ inline void commit_row() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups but the newest ones, as many as are to be ahead of the row that is needed.
__device__ inline void wait_for_row() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kMostAhead - 1) : "memory");
#endif
}

}  // namespace ops::cuda
