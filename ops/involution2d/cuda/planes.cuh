// planes: involution with stride 1, for 3×3, 5×5 and 7×7 kernels and NCHW image and weight.
//
//      windows [channel][row][column]      weights of kernel row a      register tile
//      ┌─────────────────────┐             ┌────────────────┐           ┌────────────────┐
//      │ rows y … y + K − 1, │   row y + a │ K taps × 4     │    FMA    │ 16 channels ×  │
//      │ halo of K − 1       │ ──────────► │ pixels         │ ────────► │ 4 pixels       │
//      └─────────────────────┘             └────────────────┘           └────────────────┘
//                                           row a + 1: prefetch
//
//   block:   a tile of one group of one image, up to 128 quads; in small grids, a chunk of the
//            group's channels (weight gradient: of the kernel rows)
//   shared:  the input windows of the tile, 16 channels at a time
//   thread:  4 adjacent pixels × 16 channels; loads a weight once for all channels
//
// Input gradient (kFlip): the same with the taps reversed and the weight of each tap read at the
// source pixel. Weight gradient: output gradients (4 pixels × 16 channels) and sums of one kernel
// row (K taps × 4 pixels) in registers; the windows of all channels of the group in shared memory.
#pragma once

#include "core/cuda/copy.cuh"
#include "involution2d/cuda/problem.cuh"

namespace ops::involution2d {

constexpr int kTileChannels = 16;  // channels in registers at a time
constexpr int kChannelStep = 4;    // kernels round a group's channels up to a multiple of this
constexpr int kQuad = 4;           // adjacent pixels of a row
constexpr int kMaxQuads = 16;      // along a row of a tile
constexpr int kWindowQuads = 3;    // loaded per thread and row: K + 3 columns at any alignment

struct PlanesProblem : Problem {
  int offset_h, offset_w;  // source pixel of output 0 at tap 0
  int tiles_h, tiles_w;
  int quads, rows;                  // of a tile: an even number of quads, a multiple of 4 rows
  int window_columns;               // columns of the windows that are filled
  int window_pitch, window_stride;  // elements per row and per channel of the windows
  int chunks, chunk_size;           // blocks per tile; channels (or kernel rows) of each
};

template <int K>
constexpr int kBlocks = K > 3 ? 3 : 4;  // per multiprocessor, limited by registers

// Window columns before the first tap. With a padding of K / 2, aligned 16-byte vectors of the
// image are then aligned vectors of the window.
template <typename T, int K>
constexpr int kLead = round_up(K / 2, kVectorBytes / sizeof(T)) - K / 2;

// Call f(Width<V>{}) with V = min(image.vector, kMaxVector), a power of two.
template <int kMaxVector, typename F>
__device__ void dispatch_vector(const Image& image, const F& f) {
  if constexpr (kMaxVector > 1) {
    if (image.vector < kMaxVector) {
      return dispatch_vector<kMaxVector / 2>(image, f);
    }
  }
  f(Width<kMaxVector>{});
}

// Ordinary loads and stores: load_vector and store_vector take more instructions here.
template <int V, typename T>
__device__ Vector<T, V> load(const T* from) {
  return *reinterpret_cast<const Vector<T, V>*>(from);
}
template <int V, typename T>
__device__ void store(T* to, const Vector<T, V>& value) {
  *reinterpret_cast<Vector<T, V>*>(to) = value;
}

// Tile of the block and quad of the thread. Eight threads cover 2 quads × 4 rows: with the window
// pitch at 32 bytes modulo 64, their loads have no bank conflict.
struct PlanesTile {
  int64_t n;
  int group, begin;  // first channel of the group (weight gradient: kernel row) of the block
  int row, col;      // first output of the tile
  int y, x;          // first pixel of the quad, in the tile

  __device__ explicit PlanesTile(const PlanesProblem& p) {
    unsigned index = blockIdx.x;
    begin = index % p.chunks * p.chunk_size;
    index /= p.chunks;
    col = index % p.tiles_w * kQuad * p.quads;
    index /= p.tiles_w;
    row = index % p.tiles_h * p.rows;
    index /= p.tiles_h;
    group = index % p.groups;
    n = index / p.groups;
    const int octet = threadIdx.x / 8, octet_row = octet / (p.quads / 2);
    y = 4 * octet_row + threadIdx.x / 2 % 4;
    x = 8 * (octet - octet_row * (p.quads / 2)) + threadIdx.x % 2 * kQuad;
  }

  // Return a pointer to channel `first` of the block's image.
  template <typename T>
  __device__ T* base(T* data, const Image& image, int first) const {
    return data + n * image.stride_n + static_cast<int64_t>(first) * image.stride_c;
  }

  // Call f(Width<V>{}, k, i) for k < min(count, kMost) and each vector of V pixels, at pixel i < 4
  // of the thread's quad, inside the image.
  template <int kMost, typename F>
  __device__ void for_each_vector(const Image& image, int count, const F& f) const {
    const int pixels = image.w - col - x;
    if (row + y >= image.h) {
      return;
    }
    dispatch_vector<kQuad>(image, [&](auto lanes) {
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
#pragma unroll
        for (int i = 0; i < kQuad; i += lanes.value) {
          if (k < count && i < pixels) {
            f(lanes, k, i);
          }
        }
      }
    });
  }

  // Round and store sums[k] in plane k < min(count, kMost); `to` points to plane 0.
  template <int kMost, typename T>
  __device__ void store_sums(const float (&sums)[kMost][kQuad], const Image& image, int count,
                             T* __restrict__ to) const {
    to += (row + y) * image.stride_h + col + x;
    for_each_vector<kMost>(image, count, [&](auto lanes, int k, int i) {
      constexpr int V = decltype(lanes)::value;
      Vector<T, V> value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        value.lane[v] = static_cast<T>(sums[k][i + v]);
      }
      store<V>(to + k * image.stride_c + i, value);
    });
  }
};

// Copy windows to shared memory in vectors of V: of `channels` channels, from pixel (row, col) on.
// Pixels outside the image and channels up to a multiple of kChannelStep are zero, by a branch: the
// zero-fill operand of cp.async takes more instructions. cp.async copies at least 4 bytes, so
// elements of 2 bytes are loaded and stored.
template <int V, typename T>
__device__ void copy_vectors(const T* __restrict__ from, const PlanesProblem& p, int row, int rows,
                             int col, int channels, T* __restrict__ to) {
  constexpr int kCopied = V * sizeof(T) < 4 ? 2 : V;
  const Image& image = p.source;
  const int columns = p.window_columns / kCopied;
  for (int i = threadIdx.x; i < round_up(channels, kChannelStep) * columns; i += blockDim.x) {
    const int c = i / columns, x = (i - c * columns) * kCopied;
    const bool inside = is_inside(col + x, image.w) & (c < channels);
    const bool second = is_inside(col + x + 1, image.w) & (c < channels);
    const T* pixel = from + (c * image.stride_c + row * image.stride_h + col + x);
    T* slot = to + c * p.window_stride + x;
#pragma unroll 4
    for (int y = 0; y < rows; ++y) {
      const bool row_inside = is_inside(row + y, image.h);
      if constexpr (kCopied > V) {
        store<2>(slot, Vector<T, 2>{inside & row_inside ? pixel[0] : T(0),
                                    second & row_inside ? pixel[1] : T(0)});
      } else if (inside & row_inside) {
        copy_async<V * sizeof(T)>(shared_address(slot), pixel);
      } else {
        store<V>(slot, Vector<T, V>{});
      }
      pixel += image.stride_h;
      slot += p.window_pitch;
    }
  }
}

// Start copying the windows of `taps` kernel rows from `first_tap` on; call finish_copies() before
// reading them.
template <int K, typename T>
__device__ void copy_windows(const T* __restrict__ from, const PlanesProblem& p,
                             const PlanesTile& tile, int first_tap, int taps, int channels,
                             T* __restrict__ to) {
  const int row = tile.row + p.offset_h + first_tap, col = tile.col + p.offset_w - kLead<T, K>;
  dispatch_vector<kVectorBytes / sizeof(T)>(p.source, [&](auto lanes) {
    copy_vectors<lanes.value>(from, p, row, p.rows + taps - 1, col, channels, to);
  });
}

__device__ inline void finish_copies() {
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
}

template <typename T, int K>
constexpr int kFirstColumn = kLead<T, K> / kQuad * kQuad;  // of a window that a thread loads

// Call f(c, x) for `channels` ≤ kTileChannels channels, rounded up to a multiple of kChannelStep.
// x: the K + 3 pixels of a window row that the K taps of a quad of outputs read.
template <int K, typename T, typename F>
__device__ void for_each_window_row(const T* row, int window_stride, int channels, const F& f) {
  constexpr int kOffset = kLead<T, K> - kFirstColumn<T, K>;
  static_assert(kOffset + K + kQuad - 1 <= kWindowQuads * kQuad);
#pragma unroll
  for (int c = 0; c < kTileChannels; ++c) {
    if (c % kChannelStep == 0 && c >= channels) {
      break;
    }
    float pixels[kWindowQuads * kQuad];
#pragma unroll
    for (int i = 0; i < kWindowQuads; ++i) {
      const T* from = row + c * window_stride + kFirstColumn<T, K> + i * kQuad;
      const auto loaded = load<kQuad>(from);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        pixels[i * kQuad + k] = to_float<T>(loaded, k);
      }
    }
    f(c, pixels + kOffset);
  }
}

// Prefetch the weights of one kernel row for a quad of outputs, an element per register: packing
// 16-bit pairs would stall on the loads. kFlip: taps in reverse order, the weight of each tap at
// its source pixel, 0 outside the image. Forward: clamp to the last pixel; sums of pixels outside
// are not stored.
template <typename T, int K, bool kFlip>
class WeightRow {
 public:
  __device__ WeightRow(const T* __restrict__ weight, const PlanesProblem& p, const PlanesTile& tile)
      : weight_(weight),
        image_(p.weight),
        h_(tile.row + tile.y + (kFlip ? p.offset_h : 0)),
        w_(tile.col + tile.x + (kFlip ? p.offset_w : 0)) {}

  __device__ void prefetch(int a) {
    const int h = kFlip ? h_ + a : min(h_, image_.h - 1), tap = (kFlip ? K - 1 - a : a) * K;
    const T* row = weight_ + (tap * image_.stride_c + h * image_.stride_h);
#pragma unroll
    for (int b = 0; b < K; ++b) {
      const T* plane = row + (kFlip ? K - 1 - b : b) * image_.stride_c;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const int w = kFlip ? w_ + b + i : min(w_ + i, image_.w - 1);
        const bool inside = !kFlip || (is_inside(h, image_.h) && is_inside(w, image_.w));
        next_[b][i] = inside ? reinterpret_cast<const Bits*>(plane)[w] : 0;
      }
    }
  }

  __device__ void unpack(float (&taps)[K][kQuad]) const {
#pragma unroll
    for (int i = 0; i < K * kQuad; ++i) {
      const Bits bits = static_cast<Bits>(next_[i / kQuad][i % kQuad]);
      taps[i / kQuad][i % kQuad] = static_cast<float>(reinterpret_cast<const T&>(bits));
    }
  }

 private:
  using Bits = typename BitsOf<sizeof(T)>::type;
  const T* __restrict__ weight_;
  const Image& image_;
  int h_, w_;
  unsigned next_[K][kQuad];
};

// Forward (source: x) or, with kFlip, input gradient (source: grad_output).
template <typename T, int K, bool kFlip>
__global__ void __launch_bounds__(kThreads, kBlocks<K>)
    planes_kernel(const __grid_constant__ PlanesProblem p, const T* __restrict__ source,
                  const T* __restrict__ weight, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const PlanesTile tile(p);
  WeightRow<T, K, kFlip> weights(tile.base(weight, p.weight, tile.group * K * K), p, tile);
  const int end = min(tile.begin + p.chunk_size, p.channels);
  for (int first = tile.begin; first < end; first += kTileChannels) {
    const int channels = min(kTileChannels, end - first);
    const int channel = tile.group * p.channels + first;
    if (first > tile.begin) {
      __syncthreads();
    }
    weights.prefetch(0);
    copy_windows<K>(tile.base(source, p.source, channel), p, tile, 0, K, channels, windows);
    finish_copies();
    float sum[kTileChannels][kQuad] = {};
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      float taps[K][kQuad];
      weights.unpack(taps);
      if (a + 1 < K) {
        weights.prefetch(a + 1);
      }
      const T* row = windows + (tile.y + a) * p.window_pitch + tile.x;
      for_each_window_row<K>(row, p.window_stride, channels, [&](int c, const float* x) {
#pragma unroll
        for (int tap = 0; tap < K * kQuad; ++tap) {
          const int b = tap / kQuad, i = tap % kQuad;
          sum[c][i] += taps[b][i] * x[b + i];
        }
      });
    }
    tile.store_sums(sum, p.out, channels, tile.base(out, p.out, channel));
  }
}

template <typename T, int K>
__global__ void __launch_bounds__(kThreads, kBlocks<K>)
    planes_weight_kernel(const __grid_constant__ PlanesProblem p, const T* __restrict__ x,
                         const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  T* windows = reinterpret_cast<T*>(shared);
  const PlanesTile tile(p);
  const int channel = tile.group * p.channels;
  const int end = min(tile.begin + p.chunk_size, K);
  copy_windows<K>(tile.base(x, p.source, channel), p, tile, tile.begin, end - tile.begin,
                  p.channels, windows);
  float grads[kTileChannels][kQuad];
  const T* from =
      tile.base(grad, p.out, channel) + (tile.row + tile.y) * p.out.stride_h + tile.col + tile.x;
#pragma unroll 1
  for (int a = tile.begin; a < end; ++a) {
    float sum[K][kQuad] = {};
    for (int first = 0; first < p.channels; first += kTileChannels) {
      if (a == tile.begin || p.channels > kTileChannels) {
#pragma unroll
        for (int i = 0; i < kTileChannels * kQuad; ++i) {
          grads[i / kQuad][i % kQuad] = 0;
        }
        tile.for_each_vector<kTileChannels>(
            p.out, p.channels - first, [&](auto lanes, int c, int i) {
              constexpr int V = decltype(lanes)::value;
              const auto value = load<V>(from + (first + c) * p.out.stride_c + i);
#pragma unroll
              for (int v = 0; v < V; ++v) {
                grads[c][i + v] = static_cast<float>(value.lane[v]);
              }
            });
      }
      if (a == tile.begin && first == 0) {
        finish_copies();
      }
      const T* row =
          windows + first * p.window_stride + (tile.y + a - tile.begin) * p.window_pitch + tile.x;
      for_each_window_row<K>(row, p.window_stride, p.channels - first, [&](int c, const float* x) {
#pragma unroll
        for (int tap = 0; tap < K * kQuad; ++tap) {
          const int b = tap / kQuad, i = tap % kQuad;
          sum[b][i] += grads[c][i] * x[b + i];
        }
      });
    }
    tile.store_sums(sum, p.weight, K, tile.base(grad_weight, p.weight, (tile.group * K + a) * K));
  }
}

}  // namespace ops::involution2d
