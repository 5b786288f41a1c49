// The tiles of an involution with stride 1 and a square kernel of 3, 5 or 7: which pixels a block
// and a thread have, and how those of an image come into shared memory.
#pragma once

#include <cuda_pipeline.h>

#include "divide.cuh"
#include "involution.h"

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
  int lanes;  // adjacent elements that can move at once: of a row or, channels last, of a pixel
};

struct TiledInvolution {
  int groups, channels;  // channels of a group
  TiledImage source, weight, out;
  int offset_h, offset_w;  // the source's pixel that output 0 takes at tap 0
  int tiles_h, tiles_w;
  int fours, rows;      // of a tile: an even number, and a multiple of 4
  FastDivide pairs{1};  // a pair of fours is 8 pixels
  int columns, pitch;   // of a window in shared memory: those that are filled, those that there are
  int plane;            // from one channel's window to the next

  __device__ int width() const { return kFour * fours; }
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

// The block's tile and the thread's pixels in it. Eight threads have two fours of four rows: with
// rows 32 bytes modulo 64 apart they read other banks.
struct Tile {
  int64_t n;
  int group, row, col;  // of the tile
  int y, x;             // of the thread, in the tile

  __device__ explicit Tile(const TiledInvolution& p) {
    int64_t index = blockIdx.x;
    col = static_cast<int>(index % p.tiles_w) * p.width();
    index /= p.tiles_w;
    row = static_cast<int>(index % p.tiles_h) * p.rows;
    index /= p.tiles_h;
    group = static_cast<int>(index % p.groups);
    n = index / p.groups;
    const int eight = threadIdx.x / 8, pairs = p.fours / 2;
    const int y4 = static_cast<int>(p.pairs(eight));
    y = 4 * y4 + threadIdx.x / 2 % 4;
    x = 8 * (eight - y4 * pairs) + threadIdx.x % 2 * kFour;
  }

  template <typename T>
  __device__ T* start(T* data, const TiledImage& image, int first_channel) const {
    return data + n * image.image + static_cast<int64_t>(first_channel) * image.channel;
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

// Four elements as floats; two of 16 bits lie in a register, and an instruction each converts them.
template <typename T>
__device__ void to_floats(const Vector<T, kFour>& from, float (&to)[kFour]) {
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&from)[i / 2];
      to[i] = __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16);
    } else {
      to[i] = static_cast<float>(from.lane[i]);
    }
  }
}

// Copies an element, or several, without waiting for them where the hardware can.
template <int V, typename T>
__device__ void copy_async(T* to, const T* from, bool inside) {
  constexpr int kBytes = V * sizeof(T);
  if constexpr (kBytes >= 4) {
    __pipeline_memcpy_async(to, from, kBytes, inside ? 0 : kBytes);
  } else {
    *to = inside ? *from : T(0);
  }
}

// Copies the windows of `channels` channels, from (row, col) on, to shared memory, V elements at a
// time; zeros beyond the image, and channels of zeros to make it fours.
template <int V, typename T>
__device__ void copy_planes(const T* __restrict__ from, const TiledInvolution& p, int rows, int row,
                            int col, int channels, T* __restrict__ to) {
  const TiledImage& image = p.source;
  const int end = round_up(channels, kFour);
#pragma unroll 2
  for (Walk at(p.columns / V, rows); at.slow < end; at.next()) {
    const int h = row + at.middle, w = col + at.fast * V;
    const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w && at.slow < channels;
    copy_async<V>(to + at.slow * p.plane + at.middle * p.pitch + at.fast * V,
                  from + (inside ? at.slow * image.channel + h * image.row + w : 0), inside);
  }
}

// The same from a channels-last image, V channels at a time.
template <int V, typename T>
__device__ void copy_pixels(const T* __restrict__ from, const TiledInvolution& p, int rows, int row,
                            int col, int channels, T* __restrict__ to) {
  constexpr int kLoads = 4;  // in flight
  const TiledImage& image = p.source;
  Walk at(round_up(channels, kFour) / V, p.columns);
  while (at.slow < rows) {
    Vector<T, V> values[kLoads];
    int places[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i, at.next()) {
      const int h = row + at.slow, w = col + at.middle;
      places[i] = at.slow < rows ? at.fast * V * p.plane + at.slow * p.pitch + at.middle : -1;
      values[i] = Vector<T, V>{};
      if (h >= 0 && h < image.h && w >= 0 && w < image.w && at.slow < rows &&
          at.fast * V < channels) {
        values[i] = load<V>(from + h * image.row + w * image.pixel + at.fast * V);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (places[i] >= 0) {
          to[places[i] + v * p.plane] = values[i].lane[v];
        }
      }
    }
  }
}

// Starts to copy the windows that a tile takes; wait_for_copies() before they are read.
template <int K, typename T>
__device__ void copy_windows(const T* __restrict__ from, const TiledInvolution& p, const Tile& tile,
                             int channels, T* __restrict__ to) {
  const int rows = p.rows + K - 1;
  const int row = tile.row + p.offset_h, col = tile.col + p.offset_w - kLead<T, K>;
  const auto copy = [&](auto lanes) {
    copy_planes<lanes.value>(from, p, rows, row, col, channels, to);
  };
  if (p.source.pixel != 1) {
    p.source.lanes >= kFour ? copy_pixels<kFour>(from, p, rows, row, col, channels, to)
                            : copy_pixels<1>(from, p, rows, row, col, channels, to);
  } else if (kVectorBytes / sizeof(T) == 8 && p.source.lanes == 8) {
    copy(Width<kVectorBytes / sizeof(T)>{});
  } else if (p.source.lanes == 4) {
    copy(Width<4>{});
  } else if (p.source.lanes == 2) {
    copy(Width<2>{});
  } else {
    copy(Width<1>{});
  }
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

// Calls f(Width<1, 2 or 4>{}) with as many as an image's lanes.
template <typename F>
__device__ void dispatch_lanes(const TiledImage& image, const F& f) {
  if (image.lanes >= 4) {
    f(Width<4>{});
  } else if (image.lanes == 2) {
    f(Width<2>{});
  } else {
    f(Width<1>{});
  }
}

// Calls f(Width<V>{}, planes, c, i) for every V elements from channel c and pixel i on that there
// are of a thread's 16 channels and 4 pixels in the image `out`: pixels if planes, else channels
template <typename F>
__device__ void for_each_out(const TiledInvolution& p, const Tile& tile, int channels, const F& f) {
  const int there = p.out.w - tile.col - tile.x;  // pixels
  if (tile.row + tile.y >= p.out.h) {
    return;
  }
  const auto visit = [&](auto lanes, auto planes) {
    constexpr int kChannels = planes.value ? 1 : lanes.value;
    constexpr int kPixels = planes.value ? lanes.value : 1;
#pragma unroll
    for (int c = 0; c < kTileChannels; c += kChannels) {
#pragma unroll
      for (int i = 0; i < kFour; i += kPixels) {
        if (c < channels && i < there) {
          f(lanes, planes, c, i);
        }
      }
    }
  };
  if (p.out.lanes == 1 || (p.out.lanes == 2 && p.out.pixel != 1)) {
    visit(Width<1>{}, std::true_type{});
  } else if (p.out.pixel != 1) {
    visit(Width<4>{}, std::false_type{});
  } else if (p.out.lanes == 2) {
    visit(Width<2>{}, std::true_type{});
  } else {
    visit(Width<4>{}, std::true_type{});
  }
}

}  // namespace ops::cuda
