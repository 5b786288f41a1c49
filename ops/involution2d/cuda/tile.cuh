// The tiles of an involution with a square kernel of 3, 5 or 7: which pixels a block and a thread
// have, and how those of an image come into shared memory.
#pragma once

#include <cuda_pipeline.h>

#include "core/cuda/divide.cuh"
#include "involution2d/op.h"

namespace ops::cuda {

constexpr int kTileThreads = 128;  // at most
constexpr int kTileChannels = 16;  // a thread's at a time
constexpr int kFour = 4;           // adjacent pixels that a thread has; the channels of a step
constexpr int kTileFours = 16;     // along a row of the tile, at most

// An image tensor: its strides, and its size. Within an image 32 bits count.
struct TiledImage {
  int64_t image;
  int channel, row, pixel;
  int h, w;
  bool nchw;  // rows of adjacent columns; else adjacent channels
  int lanes;  // adjacent elements that can move at once: of a row or, channels last, of a pixel
};

struct TiledInvolution {
  int groups, channels;  // channels of a group
  TiledImage source, weight, out;
  int offset_h, offset_w;  // the source's pixel that output 0 takes at tap 0
  int tiles_h, tiles_w;
  int fours, rows;         // of a tile: an even number, and in NCHW a multiple of 4
  int lead;                // columns of a window of pixels before the first that output 0 takes
  int before_h, before_w;  // outputs of the first squares that lie before the image
  FastDivide pairs{1};     // a pair of fours is 8 pixels
  int columns, pitch;  // of a window in shared memory: those that are filled, those that there are
  int window_stride;   // from one channel's window to the next

  OPS_DEVICE int width() const { return kFour * fours; }
  OPS_DEVICE int window_channels(int at_once) const {
    return round_up(channels < at_once ? channels : at_once, kFour);
  }
};

// The columns of a window before the first that output 0 takes, so that with a padding of half the
// kernel 16 bytes of a window are 16 aligned bytes of the image.
template <typename T, int K>
constexpr int kLead = round_up(K / 2, kVectorBytes / sizeof(T)) - K / 2;

// Columns of a window that a thread takes, in fours, from the four on that holds its first.
constexpr int kWindowFours = 3;

// The block's tile.
struct TilePlace {
  int64_t n;
  int group, row, col;

  __device__ TilePlace(const TiledInvolution& p, int64_t index) {
    col = static_cast<int>(index % p.tiles_w) * p.width();
    index /= p.tiles_w;
    row = static_cast<int>(index % p.tiles_h) * p.rows;
    index /= p.tiles_h;
    group = static_cast<int>(index % p.groups);
    n = index / p.groups;
  }

  template <typename T>
  __device__ T* start(T* data, const TiledImage& image, int first_channel) const {
    return data + n * image.image + static_cast<int64_t>(first_channel) * image.channel;
  }
};

// And the thread's pixels in it. Eight threads have two fours of four rows: with rows 32 bytes
// modulo 64 apart they read other banks.
struct Tile : TilePlace {
  int y, x;

  __device__ explicit Tile(const TiledInvolution& p) : TilePlace(p, blockIdx.x) {
    const int eight = threadIdx.x / 8, pairs = p.fours / 2;
    const int y4 = static_cast<int>(p.pairs(eight));
    y = 4 * y4 + threadIdx.x / 2 % 4;
    x = 8 * (eight - y4 * pairs) + threadIdx.x % 2 * kFour;
  }
};

// A thread's walk over a box of elements that the block's threads take in turns.
struct Walk {
  int fast, middle, slow;

  __device__ Walk(int fasts, int middles) : fasts_(fasts), middles_(middles) {
    split(threadIdx.x, fast, middle, slow);
    split(blockDim.x, step_fast_, step_middle_, step_slow_);
  }
  __device__ void next() {
    fast += step_fast_;
    middle += step_middle_;
    slow += step_slow_;
    if (fast >= fasts_) {
      fast -= fasts_;
      ++middle;
    }
    if (middle >= middles_) {
      middle -= middles_;
      ++slow;
    }
  }

 private:
  int fasts_, middles_;
  int step_fast_, step_middle_, step_slow_;

  __device__ void split(int index, int& a, int& b, int& c) const {
    const int rest = index / fasts_;
    a = index - rest * fasts_;
    c = rest / middles_;
    b = rest - c * middles_;
  }
};

template <int V, typename T>
__device__ Vector<T, V> load(const T* from) {
  return *reinterpret_cast<const Vector<T, V>*>(from);
}

template <int V, typename T>
__device__ void store(T* to, const Vector<T, V>& value) {
  *reinterpret_cast<Vector<T, V>*>(to) = value;
}

// Elements as floats; two of 16 bits lie in a register, and an instruction each converts them.
template <typename T, int V>
__device__ void to_floats(const Vector<T, V>& from, float* to) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&from)[i / 2];
      to[i] = __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
    } else {
      to[i] = static_cast<float>(from.lane[i]);
    }
  }
}

// Calls f(Width<V>{}) with as many as an image's lanes, a power of two up to kMost.
template <int kMost, typename F>
__device__ void dispatch_lanes(const TiledImage& image, const F& f) {
  if constexpr (kMost > 1) {
    if (image.lanes < kMost) {
      return dispatch_lanes<kMost / 2>(image, f);
    }
  }
  f(Width<kMost>{});
}

// Copies an element, or several, without waiting for them where the hardware can; zeros if not
// `inside`. (The copy's own way to fill with zeros takes several instructions more.)
template <int V, typename T>
__device__ void copy_async(T* to, const T* from, bool inside) {
  if constexpr (V * sizeof(T) < 4) {
    *to = inside ? *from : T(0);
  } else if (inside) {
    __pipeline_memcpy_async(to, from, V * sizeof(T));
  } else {
    store<V>(to, Vector<T, V>{});
  }
}

// Copies the windows of `channels` channels, from (row, col) on, to shared memory, V elements at a
// time; zeros beyond the image, and channels of zeros to make it fours.
template <int V, typename T>
__device__ void copy_nchw(const T* __restrict__ from, const TiledInvolution& p, int rows, int row,
                          int col, int channels, T* __restrict__ to) {
  const TiledImage& image = p.source;
  const int end = round_up(channels, kFour);
#pragma unroll 2
  for (Walk at(p.columns / V, rows); at.slow < end; at.next()) {
    const int h = row + at.middle, w = col + at.fast * V;
    const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w && at.slow < channels;
    copy_async<V>(to + at.slow * p.window_stride + at.middle * p.pitch + at.fast * V,
                  from + (inside ? at.slow * image.channel + h * image.row + w : 0), inside);
  }
}

// Starts to copy the windows that a tile takes; wait_for_copies() before they are read.
template <int K, typename T>
__device__ void copy_windows(const T* __restrict__ from, const TiledInvolution& p, const Tile& tile,
                             int channels, T* __restrict__ to) {
  const int row = tile.row + p.offset_h, col = tile.col + p.offset_w - kLead<T, K>;
  dispatch_lanes<kVectorBytes / sizeof(T)>(p.source, [&](auto lanes) {
    copy_nchw<lanes.value>(from, p, p.rows + K - 1, row, col, channels, to);
  });
}

__device__ inline void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
}

// The pixels of a window's row that K taps of four outputs take.
template <typename T, int K>
struct SourceRow {
  static constexpr int kFirst = kLead<T, K> / kFour * kFour;  // of the window's columns
  static_assert(kLead < T, K > -kFirst + K + kFour - 1 <= kWindowFours * kFour);
  float lane[K + kFour - 1];

  __device__ explicit SourceRow(const T* window) {
    float fours[kWindowFours][kFour];
#pragma unroll
    for (int i = 0; i < kWindowFours; ++i) {
      to_floats(load<kFour>(window + kFirst + i * kFour), fours[i]);
    }
#pragma unroll
    for (int i = 0; i < K + kFour - 1; ++i) {
      const int at = kLead<T, K> - kFirst + i;
      lane[i] = fours[at / kFour][at % kFour];
    }
  }
};

// Calls f(Width<V>{}, c, i) for every V pixels from channel c and pixel i on that there are of a
// thread's 16 channels and 4 pixels in the image `out`.
template <typename F>
__device__ void for_each_out(const TiledInvolution& p, const Tile& tile, int channels, const F& f) {
  const int there = p.out.w - tile.col - tile.x;  // pixels
  if (tile.row + tile.y >= p.out.h) {
    return;
  }
  dispatch_lanes<kFour>(p.out, [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
#pragma unroll
    for (int c = 0; c < kTileChannels; ++c) {
#pragma unroll
      for (int i = 0; i < kFour; i += V) {
        if (c < channels && i < there) {
          f(lanes, c, i);
        }
      }
    }
  });
}

}  // namespace ops::cuda
