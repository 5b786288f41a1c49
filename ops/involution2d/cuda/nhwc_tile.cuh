// Tiles of the NHWC involution kernels: the mapping of threads to outputs, and the windows of 16
// channels in shared memory, [row][slot][channel], whatever the layout of the image. A cell is one
// pixel or, in the input gradient, a square of stride × stride pixels; a quad is 4 adjacent cells.
#pragma once

#include "core/axis.h"
#include "involution2d/cuda/tile.cuh"

namespace ops::involution2d {

constexpr int kNhwcQuads = 4;     // maximum along a row of a tile
constexpr int kNhwcRows = 8;      // maximum of a tile, in source rows
constexpr int kChannelParts = 4;  // threads per quad: each has a quarter of the channels
constexpr int kThreadChannels = kTileChannels / kChannelParts;
constexpr int kNhwcThreads = kNhwcQuads * kNhwcRows * kChannelParts;

// Maps of the taps of a cell: its output `phase` reads the b-th source pixel with tap(phase, b), or
// not (−1). The padding parity is 0 because cells start at multiples of the stride in the padded
// image. A block of the input gradient computes one row of every cell.
template <int K, int kStride, bool kFlip>
struct CellTaps
    : std::conditional_t<kFlip, TransposedAxis<K, 0, kStride>, ForwardAxis<K, kStride, 1>> {
  static constexpr int kPhases = kFlip ? kStride : 1;      // outputs per cell row
  static constexpr int kTaps = CellTaps::inputs(kPhases);  // per output and row
  static constexpr int kStep = CellTaps::step(kPhases);    // source pixels per cell
  static constexpr int kOuts = kQuad * kPhases;            // outputs per thread and channel

  // Return the first source row that a tap of the phase reads.
  static __device__ int first_row(int phase) { return CellTaps::tap(phase, 0) < 0 ? 1 : 0; }
};

// First cell and channel part of the thread. Spare threads of the last warp duplicate the last quad
// and store nothing.
struct NhwcTile : BlockTile {
  int phase;  // row of the cells
  int y, x, part;
  bool spare;

  __device__ NhwcTile(const TiledInvolution& p, int phases)
      : BlockTile(p, blockIdx.x / phases),
        phase(blockIdx.x % phases),
        part(threadIdx.x % kChannelParts) {
    const int index = threadIdx.x / kChannelParts, quads = p.quads * p.rows;
    spare = index >= quads;
    y = min(index, quads - 1) / p.quads;
    x = (min(index, quads - 1) - y * p.quads) * kQuad;
  }
};

// Interleaved row of pixels in shared memory: first the first pixel of every quad, then the second
// of every quad, …, so that threads of adjacent quads read adjacent slots.
struct InterleavedRow {
  int threads;     // quads of a row
  int per_thread;  // pixels from one quad to the next

  OPS_DEVICE int row() const { return threads * per_thread; }
  __device__ int slot(unsigned x) const { return x % per_thread * threads + x / per_thread; }
};

// Return the row layout of windows: cells of kStep pixels, kTaps taps.
template <int kTaps, int kStep>
OPS_DEVICE InterleavedRow window_layout(const TiledInvolution& p) {
  constexpr int kPixels = kQuad * kStep;
  return InterleavedRow{p.quads + (p.lead + kTaps - kStep + kPixels - 1) / kPixels, kPixels};
}
OPS_DEVICE inline int window_rows(const TiledInvolution& p, int taps, int step) {
  return (p.rows - 1) * step + taps;
}

// Return the offset of a slot; channel c is at this ^ c. The swizzle swaps the 8-channel halves of
// alternate groups of slots: fewer bank conflicts where NCHW rows are stored.
__device__ inline int slot_offset(const InterleavedRow& layout, int slot) {
  return slot * kTileChannels + (slot & layout.per_thread / 2 ? kTileChannels / 2 : 0);
}

// Copy the windows of a channels-last image; kGroup threads per column.
template <int V, typename T>
__device__ void copy_nhwc_windows(const T* __restrict__ from, const ImageView& image, int row,
                                  int col, int rows, const InterleavedRow& layout, int channels,
                                  T* __restrict__ to) {
  constexpr int kGroup = kTileChannels / kCopied<V, T>;
  const int c = threadIdx.x % kGroup * kCopied<V, T>;
  for (int x = threadIdx.x / kGroup; x < layout.row(); x += blockDim.x / kGroup) {
    const bool column_inside = is_inside(col + x, image.w);
    copy_column<V>(to + (slot_offset(layout, layout.slot(x)) ^ c), layout.row() * kTileChannels,
                   from + (row * image.stride_h + (col + x) * image.stride_w + c * image.stride_c),
                   image, row, rows, column_inside & (c < channels),
                   column_inside & (c + 1 < channels));
  }
}

// Copy the windows of an NCHW image, transposed. Four threads per row: each issues all its loads
// before the first store. kVector: aligned loads of 4 pixels.
template <bool kVector, int kMaxQuads, typename T>
__device__ void transpose_nchw_windows(const T* __restrict__ from, const ImageView& image, int row,
                                       int col, int rows, const InterleavedRow& layout,
                                       int channels, T* __restrict__ to) {
  constexpr int kGroup = 4;  // threads per row
  constexpr int kThreadQuads = (kMaxQuads + kGroup - 1) / kGroup;
  constexpr int kOutside = 1 << 30;  // of every image
  int w[kThreadQuads], index[kThreadQuads][kQuad];
#pragma unroll
  for (int k = 0; k < kThreadQuads; ++k) {
    const int x = (threadIdx.x % kGroup + k * kGroup) * kQuad;
    w[k] = x < layout.row() ? x : kOutside;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      index[k][i] = slot_offset(layout, layout.slot(x) + i * layout.threads);
    }
  }
  for (int at = threadIdx.x / kGroup; at < kTileChannels * rows; at += blockDim.x / kGroup) {
    const int c = at % kTileChannels, y = at / kTileChannels;
    const bool inside = is_inside(row + y, image.h) & (c < channels);
    const T* line = from + ((row + y) * image.stride_h + c * image.stride_c + col);
    Vector<T, kQuad> quads[kThreadQuads];
#pragma unroll
    for (int k = 0; k < kThreadQuads; ++k) {
      quads[k] = {};
      if (kVector && (inside & is_inside(col + w[k], image.w))) {
        quads[k] = load_vector<kQuad>(line + w[k]);
      }
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (!kVector && (inside & is_inside(col + w[k] + i, image.w))) {
          quads[k].lane[i] = line[w[k] + i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kThreadQuads; ++k) {
      if (w[k] < kOutside) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          to[y * layout.row() * kTileChannels + (index[k][i] ^ c)] = quads[k].lane[i];
        }
      }
    }
  }
}

// Start copying a tile's windows; call wait_for_copies() before reading them.
template <int kTaps, int kStep, typename T>
__device__ void copy_windows_to_nhwc(const T* __restrict__ from, const TiledInvolution& p,
                                     const NhwcTile& tile, int channels, T* __restrict__ to) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  constexpr int kMaxQuads = kNhwcQuads * kStep + (kQuad - 1 + kTaps - kStep + kQuad - 1) / kQuad;
  const ImageView& image = p.source;
  const InterleavedRow layout = window_layout<kTaps, kStep>(p);
  const int row = tile.row * kStep + p.offset_h, col = tile.col * kStep + p.offset_w - p.lead;
  const int rows = window_rows(p, kTaps, kStep);
  if (image.nchw && image.vector >= kQuad) {
    transpose_nchw_windows<true, kMaxQuads>(from, image, row, col, rows, layout, channels, to);
  } else if (image.nchw) {
    transpose_nchw_windows<false, kMaxQuads>(from, image, row, col, rows, layout, channels, to);
  } else if (image.vector == kVector) {
    copy_nhwc_windows<kVector>(from, image, row, col, rows, layout, channels, to);
  } else {
    copy_nhwc_windows<1>(from, image, row, col, rows, layout, channels, to);
  }
}

// Offsets of the pixels of a window row that the taps of the thread's quad read.
template <int kTaps, int kStep>
struct WindowPixels {
  static constexpr int kPixels = (kQuad - 1) * kStep + kTaps;
  int row;  // elements per window row
  int index[kPixels];

  __device__ WindowPixels(const TiledInvolution& p, const NhwcTile& tile) {
    const InterleavedRow layout = window_layout<kTaps, kStep>(p);
    row = layout.row() * kTileChannels;
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      const int slot = layout.slot(tile.x * kStep + p.lead + j);
      index[j] = tile.y * kStep * row + (slot_offset(layout, slot) ^ (tile.part * kThreadChannels));
    }
  }

  template <typename T>
  __device__ void load_pixel(const T* windows, int a, int j, float (&to)[kThreadChannels]) const {
    to_floats(load_vector<kThreadChannels>(windows + a * row + index[j]), to);
  }
};

// Call f(Width<C>{}, Width<P>{}, c, i) for each vector of C channels × P outputs (one of them is
// 1), at channel c of the thread's and output i of the kOuts from (h, w) on, left of column `end`.
template <int kOuts, typename F>
__device__ void for_each_output_pixel(const TiledInvolution& p, const NhwcTile& tile, int channels,
                                      int h, int w, int end, const F& f) {
  const int valid = channels - tile.part * kThreadChannels;
  if (tile.spare || !is_inside(h, p.out.h)) {
    return;
  }
  const auto visit = [&](auto channel_width, auto pixel_width) {
    constexpr int C = decltype(channel_width)::value, P = decltype(pixel_width)::value;
#pragma unroll
    for (int c = 0; c < kThreadChannels; c += C) {
#pragma unroll
      for (int i = 0; i < kOuts; i += P) {
        if (c < valid && w + i >= 0 && w + i + P <= end) {
          f(channel_width, pixel_width, c, i);
        } else if (kOuts > kQuad && i + P == kOuts && c < valid) {  // the last vector may be cut
#pragma unroll
          for (int j = i; j < i + P; ++j) {
            if (is_inside(w + j, end)) {
              f(channel_width, Width<1>{}, c, j);
            }
          }
        }
      }
    }
  };
  if (p.out.vector < kQuad) {
    visit(Width<1>{}, Width<1>{});
  } else if (p.out.nchw) {
    visit(Width<1>{}, Width<kQuad>{});
  } else {
    visit(Width<kThreadChannels>{}, Width<1>{});
  }
}

}  // namespace ops::involution2d
