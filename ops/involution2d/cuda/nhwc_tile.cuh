// The tiles of involutions that are made for channels-last images: 4 adjacent pixels of a tile and
// 16 channels belong to 4 threads, a quarter of the channels each. The windows of 16 channels lie
// in shared memory as in such images, the channels side by side.
#pragma once

#include "involution2d/cuda/tile.cuh"

namespace ops::cuda {

constexpr int kPixelFours = 4;  // along a row of the tile, at most
constexpr int kPixelRows = 8;   // of the tile, at most
constexpr int kPixelParts = 4;  // threads that share four pixels
constexpr int kPartChannels = kTileChannels / kPixelParts;
constexpr int kPixelThreads = kPixelFours * kPixelRows * kPixelParts;

// How the pixels that threads have and the source's are related. The input gradient's pixels come
// in squares of kStride x kStride, of which all have the same source pixels but take different
// taps, at every kStride in reverse; a block has one row of each square.
template <int K, int kStride, bool kFlip>
struct PixelTaps {
  static constexpr int kPhases = kFlip ? kStride : 1;        // adjacent outputs of a square's row
  static constexpr int kTaps = (K + kPhases - 1) / kPhases;  // of a row that an output takes
  static constexpr int kStep = kFlip ? 1 : kStride;  // source pixels from a square to the next
  static constexpr int kOuts = kFour * kPhases;      // adjacent outputs of a thread

  // Which tap of K takes the b-th source pixel; where there is none it is K.
  static __device__ int tap(int phase, int b) {
    return kFlip ? phase + kPhases * (kTaps - 1 - b) : b;
  }
  // The first row of source pixels that a tap takes.
  static __device__ int first_row(int phase) { return tap(phase, 0) < K ? 0 : 1; }
};

// The thread's pixels (squares) and channels of a tile. Rows of a tile do not straddle warps. The
// last warp's spare threads repeat the last pixels.
struct PixelTile : TilePlace {
  int phase;  // which row of the squares
  int y, x, part;
  bool spare;

  __device__ PixelTile(const TiledInvolution& p, int phases)
      : TilePlace(p, blockIdx.x / phases),
        phase(blockIdx.x % phases),
        part(threadIdx.x % kPixelParts) {
    const int index = threadIdx.x / kPixelParts, fours = p.fours * p.rows;
    spare = index >= fours;
    y = min(index, fours - 1) / p.fours;
    x = (min(index, fours - 1) - y * p.fours) * kFour;
  }
};

// Rows of pixels in shared memory. Threads take theirs one after the other, so first come the
// pixels that they take first, side by side, then the next.
struct PixelLayout {
  int threads;    // of a row
  int of_thread;  // pixels from one thread's first to the next one's

  OPS_DEVICE int row() const { return threads * of_thread; }
  __device__ int place(unsigned x) const { return x % of_thread * threads + x / of_thread; }
};

// Of windows that kTaps taps take at every kStep pixels.
template <int kTaps, int kStep>
OPS_DEVICE PixelLayout window_layout(const TiledInvolution& p) {
  constexpr int kPixels = kFour * kStep;
  return PixelLayout{p.fours + (p.lead + kTaps - kStep + kPixels - 1) / kPixels, kPixels};
}
OPS_DEVICE inline int window_rows(const TiledInvolution& p, int taps, int step) {
  return (p.rows - 1) * step + taps;
}

// Where a window's pixel lies; its channel c is at this ^ c. The halves of every other pixels are
// exchanged, so that threads that store the same channels of NCHW rows do so in other banks.
__device__ inline int window_index(const PixelLayout& layout, int place) {
  return place * kTileChannels + (place & layout.of_thread / 2 ? kTileChannels / 2 : 0);
}

// In one comparison.
__device__ inline bool is_inside(int i, int extent) {
  return static_cast<unsigned>(i) < static_cast<unsigned>(extent);
}

// Copies the windows of a channels-last image, V channels at a time, a column for a group of
// threads.
template <int V, typename T>
__device__ void copy_window_pixels(const T* __restrict__ from, const TiledImage& image, int row,
                                   int col, int rows, const PixelLayout& layout, int channels,
                                   T* __restrict__ to) {
  constexpr int kGroup = kTileChannels / V;
  const int c = threadIdx.x % kGroup * V;
  for (int x = threadIdx.x / kGroup; x < layout.row(); x += blockDim.x / kGroup) {
    const bool there = is_inside(col + x, image.w) & (c < channels);
    const T* next = from + (row * image.row + (col + x) * image.pixel + c * image.channel);
    T* next_to = to + (window_index(layout, layout.place(x)) ^ c);
#pragma unroll 4
    for (int y = 0; y < rows; ++y) {
      copy_async<V>(next_to, next, there & is_inside(row + y, image.h));
      next += image.row;
      next_to += layout.row() * kTileChannels;
    }
  }
}

// NCHW: a thread loads fours of a row before it stores the first; kVector: each at once.
template <bool kVector, int kMostFours, typename T>
__device__ void copy_window_rows(const T* __restrict__ from, const TiledImage& image, int row,
                                 int col, int rows, const PixelLayout& layout, int channels,
                                 T* __restrict__ to) {
  constexpr int kGroup = 4;  // threads of a row
  constexpr int kEach = (kMostFours + kGroup - 1) / kGroup;
  constexpr int kBeyond = 1 << 30;  // any image
  int w[kEach], index[kEach][kFour];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int x = (threadIdx.x % kGroup + k * kGroup) * kFour;
    w[k] = x < layout.row() ? x : kBeyond;
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      index[k][i] = window_index(layout, layout.place(x) + i * layout.threads);
    }
  }
  for (int at = threadIdx.x / kGroup; at < kTileChannels * rows; at += blockDim.x / kGroup) {
    const int c = at % kTileChannels, y = at / kTileChannels;
    const bool there = is_inside(row + y, image.h) & (c < channels);
    const T* line = from + ((row + y) * image.row + c * image.channel + col);
    Vector<T, kFour> fours[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      fours[k] = {};
      if (kVector && (there & is_inside(col + w[k], image.w))) {
        fours[k] = load_vector<kFour>(line + w[k]);
      }
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        if (!kVector && (there & is_inside(col + w[k] + i, image.w))) {
          fours[k].lane[i] = line[w[k] + i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (w[k] < kBeyond) {
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          to[y * layout.row() * kTileChannels + (index[k][i] ^ c)] = fours[k].lane[i];
        }
      }
    }
  }
}

// Starts to copy the windows that a tile takes; wait_for_copies() before they are read.
template <int kTaps, int kStep, typename T>
__device__ void copy_pixel_windows(const T* __restrict__ from, const TiledInvolution& p,
                                   const PixelTile& tile, int channels, T* __restrict__ to) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  constexpr int kMostFours = kPixelFours * kStep + (kFour - 1 + kTaps - kStep + kFour - 1) / kFour;
  const TiledImage& image = p.source;
  const PixelLayout layout = window_layout<kTaps, kStep>(p);
  const int row = tile.row * kStep + p.offset_h, col = tile.col * kStep + p.offset_w - p.lead;
  const int rows = window_rows(p, kTaps, kStep);
  if (image.nchw && image.lanes >= kFour) {
    copy_window_rows<true, kMostFours>(from, image, row, col, rows, layout, channels, to);
  } else if (image.nchw) {
    copy_window_rows<false, kMostFours>(from, image, row, col, rows, layout, channels, to);
  } else if (image.lanes == kVector) {
    copy_window_pixels<kVector>(from, image, row, col, rows, layout, channels, to);
  } else {
    copy_window_pixels<1>(from, image, row, col, rows, layout, channels, to);
  }
}

// A thread's channels of the source's pixels that kTaps taps of four squares take, of a window's
// row.
template <int kTaps, int kStep>
struct PixelRow {
  static constexpr int kPixels = (kFour - 1) * kStep + kTaps;
  int row;  // elements from one to the next
  int index[kPixels];

  __device__ PixelRow(const TiledInvolution& p, const PixelTile& tile) {
    const PixelLayout layout = window_layout<kTaps, kStep>(p);
    row = layout.row() * kTileChannels;
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      const int place = layout.place(tile.x * kStep + p.lead + j);
      index[j] = tile.y * kStep * row + (window_index(layout, place) ^ (tile.part * kPartChannels));
    }
  }

  template <typename T>
  __device__ void load_pixel(const T* windows, int a, int j, float (&to)[kPartChannels]) const {
    to_floats(load_vector<kPartChannels>(windows + a * row + index[j]), to);
  }
};

// Calls f(Width<C>{}, Width<P>{}, c, i) for every C channels from the thread's c on of P adjacent
// outputs from its i on, of kOuts from (h, w) on, that are in the image before column `end`.
template <int kOuts, typename F>
__device__ void for_each_pixel_out(const TiledInvolution& p, const PixelTile& tile, int channels,
                                   int h, int w, int end, const F& f) {
  const int there = channels - tile.part * kPartChannels;
  if (tile.spare || !is_inside(h, p.out.h)) {
    return;
  }
  const auto visit = [&](auto of_channels, auto of_pixels) {
    constexpr int C = decltype(of_channels)::value, P = decltype(of_pixels)::value;
#pragma unroll
    for (int c = 0; c < kPartChannels; c += C) {
#pragma unroll
      for (int i = 0; i < kOuts; i += P) {
        if (c < there && w + i >= 0 && w + i + P <= end) {
          f(of_channels, of_pixels, c, i);
        } else if (kOuts > kFour && i + P == kOuts && c < there) {  // the last four may be cut
#pragma unroll
          for (int j = i; j < i + P; ++j) {
            if (is_inside(w + j, end)) {
              f(of_channels, Width<1>{}, c, j);
            }
          }
        }
      }
    }
  };
  if (p.out.lanes < kFour) {
    visit(Width<1>{}, Width<1>{});
  } else if (p.out.nchw) {
    visit(Width<1>{}, Width<kFour>{});
  } else {
    visit(Width<kPartChannels>{}, Width<1>{});
  }
}

}  // namespace ops::cuda
