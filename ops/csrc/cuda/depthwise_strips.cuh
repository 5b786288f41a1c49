// How threads go through channels-last images, and how they read them.
#pragma once

#include "depthwise_stencil.cuh"

namespace ops::cuda {

// A block has lanes × groups × images threads: the lanes' channels lie side by side, and so do the
// groups' strips. It marches down one segment of its images.
struct StripLaunch {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // image coordinate of the first output's first input
  int tiles_w;           // blocks across an image
  int segments;          // blocks down an image
  int steps;             // a segment's length, in groups of output rows that complete together
  int images;
  int channels;
};

constexpr int kStripThreads = 128;
constexpr int kMostLanes = 32;
constexpr int kRowsAhead = 2;
constexpr int kRingRows = kRowsAhead + 1;

// How a thread's V channels lie, and so how they move. With vectors a pixel's move at once, which
// takes aligned pixels. Without, 32-bit channels lie as many apart as there are lanes, so that a
// warp's single elements are neighbours; 16-bit ones lie side by side, and the whole 32-bit words
// that hold them move.
template <int V, bool kVector, typename T>
struct StripPlace {
  static constexpr bool kApart = !kVector && sizeof(T) == 4;
  static constexpr int kWords = kVector ? 1 : (kApart ? V : V / 2 + 1);
  static constexpr int kWordBytes = kVector ? V * static_cast<int>(sizeof(T)) : 4;

  int tile, segment;
  int64_t n;
  int first_channel;  // the block's
  int channel, apart, count;
  int channels;  // of the image

  __device__ explicit StripPlace(const StripLaunch& launch)
      : tile(blockIdx.x % launch.tiles_w),
        segment(blockIdx.x / launch.tiles_w % launch.segments),
        n(static_cast<int64_t>(blockIdx.x) / launch.tiles_w / launch.segments * blockDim.z +
          threadIdx.z),
        first_channel(blockIdx.y * blockDim.x * V),
        channel(first_channel + threadIdx.x * (kApart ? 1 : V)),
        apart(kApart ? blockDim.x : 1),
        channels(launch.channels) {
    const int rest = launch.channels - channel;
    count = n >= launch.images || rest <= 0 ? 0 : min(V, (rest + apart - 1) / apart);
  }

  // Position of channel v among the block's.
  __device__ int slot(int v) const { return channel - first_channel + v * apart; }

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

  __device__ void store(T* pixel, const float (&x)[V]) const {
    if constexpr (kVector) {
      Vector<T, V> lanes;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        lanes.lane[v] = static_cast<T>(x[v]);
      }
      using Bits = typename BitsOf<V * sizeof(T)>::type;
      *reinterpret_cast<Bits*>(pixel) = reinterpret_cast<const Bits&>(lanes);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (v < count) {
          pixel[v * apart] = static_cast<T>(x[v]);
        }
      }
    }
  }
};

// Reads a strip's rows, kCols pixels each, for one thread. With a ring the thread has its own
// copies of kRows rows on their way into shared memory; no other thread reads them, so none has to
// wait for another. Without, rows come when they are needed: cheaper where a row is little work.
template <int V, bool kVector, bool kRing, int kRows, int kCols, typename T>
class RowReader {
  using Place = StripPlace<V, kVector, T>;
  using Bits = typename BitsOf<Place::kWordBytes>::type;
  static_assert(!kRing || Place::kWordBytes >= 4, "what can be copied asynchronously");
  static_assert(kRing || kVector);

 public:
  // Shared memory of a block.
  static constexpr size_t kBytes =
      kRing ? kRows * kCols * Place::kWords * Place::kWordBytes * kStripThreads : 0;

  // `columns` are those of the strip that are inside the image; the others are zero.
  __device__ RowReader(const Place& at, unsigned char* memory, unsigned columns)
      : at_(at), columns_(columns) {
    if constexpr (kRing) {
      const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      words_ = reinterpret_cast<Bits*>(memory) + thread;
      for (int i = 0; i < kRows * kCols * Place::kWords; ++i) {
        words_[i * kStripThreads] = {};
      }
    }
  }

  // Begins to copy the row that starts at `pixel`, the thread's first channel of it.
  __device__ void fetch(const T* pixel, int row) {
    if constexpr (kRing) {
#pragma unroll
      for (int i = 0; i < kCols; ++i, pixel += at_.channels) {
        if (columns_ & 1u << i) {
          fetch_pixel(pixel, row, i);
        }
      }
    }
  }

  // x = the row, which starts at `pixel`.
  __device__ void read(const T* pixel, int row, float (&x)[kCols][V]) const {
    if constexpr (!kVector) {
#pragma unroll
      for (int i = 0; i < kCols; ++i, pixel += at_.channels) {
        assemble(pixel, row, i, x[i]);
      }
    } else {
      Bits bits[kCols];
#pragma unroll
      for (int i = 0; i < kCols; ++i, pixel += at_.channels) {
        if constexpr (kRing) {
          bits[i] = *word(row, i, 0);
        } else {
          bits[i] = {};
          if (columns_ & 1u << i) {
            bits[i] = *reinterpret_cast<const Bits*>(pixel);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        const auto& lanes = reinterpret_cast<const Vector<T, V>&>(bits[i]);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          x[i][v] = static_cast<float>(lanes.lane[v]);
        }
      }
    }
  }

 private:
  const Place& at_;
  unsigned columns_;
  Bits* words_;

  __device__ Bits* word(int row, int i, int k) const {
    return words_ + ((row * kCols + i) * Place::kWords + k) * kStripThreads;
  }

  // Elements of the word in which a pixel begins that are not the thread's.
  static __device__ int misplaced(const T* pixel) {
    return reinterpret_cast<uintptr_t>(pixel) % 4 / sizeof(T);
  }

  __device__ void fetch_pixel(const T* pixel, int row, int i) {
#pragma unroll
    for (int k = 0; k < Place::kWords; ++k) {
      const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(word(row, i, k)));
      if constexpr (kVector || Place::kApart) {
        if (kVector || k < at_.count) {
          asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to),
                       "l"(pixel + k * at_.apart), "n"(Place::kWordBytes)
                       : "memory");
        }
      } else {
        const int before = misplaced(pixel);
        const int left = at_.count + before - 2 * k;  // elements from this word on
        if (left > 0) {
          asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
                       "l"(pixel - before + 2 * k), "r"(left == 1 ? 2 : 4)
                       : "memory");
        }
      }
    }
  }

  // x = a pixel from the words that hold it.
  __device__ void assemble(const T* pixel, int row, int i, float (&x)[V]) const {
    if constexpr (Place::kApart) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        x[v] = __uint_as_float(*word(row, i, v));
      }
    } else {
      const int shift = 16 * misplaced(pixel);
#pragma unroll
      for (int v = 0; v < V; v += 2) {
        const unsigned low = *word(row, i, v / 2);
        const unsigned high = V > 1 ? *word(row, i, (v + 2) / 2 % Place::kWords) : 0;
        const unsigned pair = __funnelshift_r(low, high, shift);
        const auto& lanes = reinterpret_cast<const Vector<T, 2>&>(pair);
#pragma unroll
        for (int k = 0; k < 2 && v + k < V; ++k) {
          x[v + k] = static_cast<float>(lanes.lane[k]);
        }
      }
    }
  }
};

// Ends a group of fetches.
__device__ inline void commit_row() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups but the newest ones, as many as are to be ahead of the row that is needed.
__device__ inline void wait_for_row() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kRowsAhead - 1) : "memory");
}

}  // namespace ops::cuda
