// Tiles of the tuned involution kernels (3×3, 5×5, 7×7): parameters, the mapping of blocks and
// threads to outputs, and the copy of NCHW windows to shared memory. A window is the input of a
// tile: its pixels and the halo around them. A quad is 4 adjacent pixels of a row.
#pragma once

#include "core/cuda/copy.cuh"
#include "core/cuda/divide.cuh"
#include "involution2d/op.h"

namespace ops::involution2d {

using namespace cuda;

constexpr int kNchwThreads = 128;  // maximum of a block
constexpr int kTileChannels = 16;  // channels in registers at a time
constexpr int kQuad = 4;
constexpr int kChannelStep = 4;  // kernels round a group's channels up to a multiple of this
constexpr int kNchwQuads = 16;   // maximum along a row of a tile

// Size and strides (elements) of an image tensor. Offsets within one image fit 32 bits.
struct ImageView {
  int64_t stride_n;
  int stride_c, stride_h, stride_w;
  int h, w;
  bool nchw;   // stride_w = 1; otherwise channels-last, stride_c = 1
  int vector;  // elements of the widest aligned load, along w (NCHW) or c (channels-last)
};

struct TiledInvolution {
  int groups, channels;  // channels per group
  ImageView source, weight, out;
  int offset_h, offset_w;  // source pixel of output 0 at tap 0
  int tiles_h, tiles_w;
  int quads, rows;    // tile size: quads per row (even), rows (NCHW kernel: a multiple of 4)
  int window_stride;  // elements per channel (NCHW kernel) or of all 16 channels (NHWC kernel)

  // NCHW kernel
  FastDivide quad_pairs{1};          // divides by quads / 2
  int window_columns, window_pitch;  // columns that are filled, row stride
  int chunks = 1, chunk_size = 0;    // blocks per tile; channels (or kernel rows) of each

  // NHWC kernel
  int lead;                                      // window columns before the first tap
  int cell_offset_h, cell_offset_w;              // pixels of the first cell outside the image
  FastDivide weight_columns{1}, weight_rows{1};  // divide by those of the weight tile

  OPS_DEVICE int width() const { return kQuad * quads; }  // of a tile
  OPS_DEVICE int window_channels(int at_once) const {
    return round_up(channels < at_once ? channels : at_once, kChannelStep);
  }
};

// Window columns before the first tap. With a padding of K / 2, aligned 16-byte vectors of the
// image are then aligned vectors of the window.
template <typename T, int K>
constexpr int kLead = round_up(K / 2, kVectorBytes / sizeof(T)) - K / 2;

// Quads of a window row that a thread loads: enough for K + 3 columns at any alignment.
constexpr int kWindowQuads = 3;

// Image, group and first output of the block's tile.
struct BlockTile {
  int64_t n;
  int group, row, col;

  __device__ BlockTile(const TiledInvolution& p, int64_t index) {
    col = static_cast<int>(index % p.tiles_w) * p.width();
    index /= p.tiles_w;
    row = static_cast<int>(index % p.tiles_h) * p.rows;
    index /= p.tiles_h;
    group = static_cast<int>(index % p.groups);
    n = index / p.groups;
  }

  // Return a pointer to `first_channel` of the block's image.
  template <typename T>
  __device__ T* base(T* data, const ImageView& image, int first_channel) const {
    return data + n * image.stride_n + static_cast<int64_t>(first_channel) * image.stride_c;
  }
};

// First pixel of the thread's quad in the block's tile. Eight threads cover 2 quads × 4 rows: with
// the window pitch at 32 bytes modulo 64, their loads have no bank conflict.
struct NchwTile : BlockTile {
  int y, x;
  int begin;  // first channel of the group (weight gradient: kernel row) of the block

  __device__ explicit NchwTile(const TiledInvolution& p)
      : BlockTile(p, blockIdx.x / p.chunks), begin(blockIdx.x % p.chunks * p.chunk_size) {
    const int octet = threadIdx.x / 8, quad_pairs = p.quads / 2;
    const int quad_row = static_cast<int>(p.quad_pairs(octet));
    y = 4 * quad_row + threadIdx.x / 2 % 4;
    x = 8 * (octet - quad_row * quad_pairs) + threadIdx.x % 2 * kQuad;
  }
};

// Ordinary loads and stores: load_vector and store_vector make these kernels longer.
template <int V, typename T>
__device__ Vector<T, V> load(const T* from) {
  return *reinterpret_cast<const Vector<T, V>*>(from);
}

template <int V, typename T>
__device__ void store(T* to, const Vector<T, V>& value) {
  *reinterpret_cast<Vector<T, V>*>(to) = value;
}

// Round V sums and store them.
template <int V, typename T>
__device__ void store_sums(T* to, const float* sums) {
  Vector<T, V> value;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    value.lane[v] = static_cast<T>(sums[v]);
  }
  store<V>(to, value);
}

// Convert elements to float. A pair of bfloat16 in one register takes one instruction per element.
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

// Call f(Width<V>{}) with V = min(image.vector, kMaxVector), a power of two.
template <int kMaxVector, typename F>
__device__ void dispatch_vector(const ImageView& image, const F& f) {
  if constexpr (kMaxVector > 1) {
    if (image.vector < kMaxVector) {
      return dispatch_vector<kMaxVector / 2>(image, f);
    }
  }
  f(Width<kMaxVector>{});
}

// Elements of a copy to shared memory that is aligned to V: at least 4 bytes.
template <int V, typename T>
constexpr int kCopied = V * sizeof(T) < 4 ? 2 : V;

// Copy kCopied<V, T> elements to shared memory: by cp.async, or two loads of 2 bytes. Zeros unless
// `inside` and, for the second of two, `second_inside`. (The zero-fill operand of cp.async takes
// more instructions than the branch.)
template <int V, typename T>
__device__ void copy_or_clear(T* to, const T* from, bool inside, bool second_inside = false) {
  if constexpr (kCopied<V, T> > V) {
    store<2>(to, Vector<T, 2>{inside ? from[0] : T(0), second_inside ? from[1] : T(0)});
  } else if (inside) {
    copy_async<V * sizeof(T)>(shared_address(to), from);
  } else {
    store<V>(to, Vector<T, V>{});
  }
}

// Copy `rows` rows of a column of vectors, from row `row` of the image on; see copy_or_clear.
template <int V, typename T>
__device__ void copy_column(T* to, int to_pitch, const T* from, const ImageView& image, int row,
                            int rows, bool inside, bool second_inside = false) {
#pragma unroll 4
  for (int y = 0; y < rows; ++y) {
    const bool row_inside = is_inside(row + y, image.h);
    copy_or_clear<V>(to, from, inside & row_inside, second_inside & row_inside);
    from += image.stride_h;
    to += to_pitch;
  }
}

// Copy the windows of `channels` channels, from pixel (row, col) on, to shared memory. Pixels
// outside the image and channels up to a multiple of kChannelStep are zero.
template <int V, typename T>
__device__ void copy_nchw_windows(const T* __restrict__ from, const TiledInvolution& p, int rows,
                                  int row, int col, int channels, T* __restrict__ to) {
  const ImageView& image = p.source;
  const int columns = p.window_columns / kCopied<V, T>;
  for (int i = threadIdx.x; i < round_up(channels, kChannelStep) * columns; i += blockDim.x) {
    const int c = i / columns, x = (i - c * columns) * kCopied<V, T>;
    const bool inside = is_inside(col + x, image.w) & (c < channels);
    const bool second = is_inside(col + x + 1, image.w) & (c < channels);
    copy_column<V>(to + c * p.window_stride + x, p.window_pitch,
                   from + (c * image.stride_c + row * image.stride_h + col + x), image, row, rows,
                   inside, second);
  }
}

// Start copying the windows of `taps` kernel rows from `first_tap` on; call finish_copies()
// before reading them.
template <int K, typename T>
__device__ void copy_windows(const T* __restrict__ from, const TiledInvolution& p,
                             const NchwTile& tile, int first_tap, int taps, int channels,
                             T* __restrict__ to) {
  const int row = tile.row + p.offset_h + first_tap, col = tile.col + p.offset_w - kLead<T, K>;
  dispatch_vector<kVectorBytes / sizeof(T)>(p.source, [&](auto lanes) {
    copy_nchw_windows<lanes.value>(from, p, p.rows + taps - 1, row, col, channels, to);
  });
}

__device__ inline void finish_copies() {
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
}

// The K + 3 pixels of a window row that the K taps of a quad of outputs read, as floats.
template <typename T, int K>
struct WindowRow {
  static constexpr int kFirst = kLead<T, K> / kQuad * kQuad;  // window column of the first load
  static_assert(kLead < T, K > -kFirst + K + kQuad - 1 <= kWindowQuads * kQuad);
  float pixel[K + kQuad - 1];

  __device__ explicit WindowRow(const T* window) {
    float quads[kWindowQuads][kQuad];
#pragma unroll
    for (int i = 0; i < kWindowQuads; ++i) {
      to_floats(load<kQuad>(window + kFirst + i * kQuad), quads[i]);
    }
#pragma unroll
    for (int i = 0; i < K + kQuad - 1; ++i) {
      const int at = kLead<T, K> - kFirst + i;
      pixel[i] = quads[at / kQuad][at % kQuad];
    }
  }
};

// Call f(Width<V>{}, c, i) for each vector of V pixels, at channel c < min(channels, 16) and pixel
// i < 4 of the thread's quad, inside the image p.out.
template <typename F>
__device__ void for_each_output(const TiledInvolution& p, const NchwTile& tile, int channels,
                                const F& f) {
  const int pixels = p.out.w - tile.col - tile.x;
  if (tile.row + tile.y >= p.out.h) {
    return;
  }
  dispatch_vector<kQuad>(p.out, [&](auto lanes) {
    constexpr int V = decltype(lanes)::value;
#pragma unroll
    for (int c = 0; c < kTileChannels; ++c) {
#pragma unroll
      for (int i = 0; i < kQuad; i += V) {
        if (c < channels && i < pixels) {
          f(lanes, c, i);
        }
      }
    }
  });
}

}  // namespace ops::involution2d
