// Involution with stride 1 and a square kernel of 3, 5 or 7. A block computes a tile of a group of
// channels: the windows of the source lie in shared memory, a thread keeps 4 adjacent pixels of up
// to 16 channels in registers and takes every weight once for all of them. Weights come a row of
// the kernel at a time, through shared memory, so that their loads and stores are coalesced in both
// memory formats and whatever the alignment.
#pragma once

#include "common.cuh"
#include "involution.h"

namespace ops::cuda {

constexpr int kTileRows = 16;
constexpr int kTileChannels = 16;  // a thread's
constexpr int kTilePixels = 4;     // a thread's
constexpr int kMostQuads = 8;      // threads along a row of the tile
constexpr int kTileThreads = kMostQuads * kTileRows;
constexpr int kWindowHalo =
    8;  // columns beyond the tile: at least a kernel's, and 16 bytes' multiple

// An image tensor: its strides, and its size. Within an image 32 bits count.
struct TiledImage {
  int64_t image;
  int channel, row, pixel;
  int h, w;
};

struct TiledInvolution {
  int groups, channels;  // channels of a group
  TiledImage source, weight, out;
  int offset_h, offset_w;  // the source's pixel that output 0 takes at tap 0
  int tiles_h, tiles_w;
  bool weight_fours, out_fours;  // whether adjacent elements come in aligned fours
};

// What lies where in shared memory, in floats. Distances of 4 modulo 32, the banks, let threads
// that hold adjacent channels or taps store side by side.
struct TileLayout {
  int width, pitch;  // of the tile and of a window's row
  int window, grad;  // from one channel to the next
  int taps;          // from one tap to the next

  OPS_DEVICE TileLayout(int quads, int kernel)
      : width(kTilePixels * quads),
        pitch(width + kWindowHalo),
        window(spread((kTileRows + kernel - 1) * pitch)),
        grad(spread(kTileRows * pitch)),
        taps(spread(kTileRows * width)) {}

 private:
  static OPS_DEVICE int spread(int x) { return x + (36 - x % 32) % 32; }
};

// The block's tile and the thread's place in it.
struct Tile {
  int64_t n;
  int group, row, col;  // of its first pixel
  int y, x;             // the thread's row, and its first column, in the tile

  __device__ explicit Tile(const TiledInvolution& p) {
    int64_t index = blockIdx.x;
    col = static_cast<int>(index % p.tiles_w) * blockDim.x * kTilePixels;
    index /= p.tiles_w;
    row = static_cast<int>(index % p.tiles_h) * kTileRows;
    index /= p.tiles_h;
    group = static_cast<int>(index % p.groups);
    n = index / p.groups;
    // Neighbours two rows apart: in a tile four threads wide they then read from other banks.
    const int i = threadIdx.y;
    y = (i & ~3) | (i & 1) << 1 | (i >> 1 & 1);
    x = threadIdx.x * kTilePixels;
  }

  template <typename T>
  __device__ T* start(T* data, const TiledImage& image, int first_channel) const {
    return data + n * image.image + static_cast<int64_t>(first_channel) * image.channel;
  }
};

__device__ inline int thread_index() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

// Copies kRows rows of `channels` channels, from (row, col) on and `pitch` columns, to shared
// memory; zeros beyond the image.
template <int kRows, typename T>
__device__ void stage_image(const T* __restrict__ from, const TiledImage& image, int row, int col,
                            int channels, float* __restrict__ to, int pitch, int plane) {
  const int threads = blockDim.x * blockDim.y;
  const bool planes = image.pixel == 1;
  // Neighbouring threads take neighbouring pixels or, in channels-last images, channels.
  const int fast = planes ? 1 : kTileChannels;
  const int first = thread_index() / fast, step = threads / fast;
  const int lines = planes ? channels * kRows : kRows;
  const int step_lines = step / pitch, step_cols = step % pitch;
  for (int base = 0; base < (planes ? 1 : channels); base += kTileChannels) {
    const int channel = planes ? 0 : base + thread_index() % kTileChannels;
    int line = first / pitch, x = first % pitch;
#pragma unroll 4
    while (line < lines) {
      const int c = planes ? line / kRows : channel;
      const int r = planes ? line % kRows : line;
      const int h = row + r, w = col + x;
      const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w && c < channels;
      const float value =
          inside ? static_cast<float>(from[c * image.channel + h * image.row + w * image.pixel])
                 : 0.f;
      if (c < channels) {
        to[c * plane + r * pitch + x] = value;
      }
      x += step_cols;
      line += step_lines;
      if (x >= pitch) {
        x -= pitch;
        ++line;
      }
    }
  }
}

// The taps of row `a` of the kernel, and where the weights of the tile lie. In the input gradient
// taps come in reverse, and their weights where the source lies.
template <int K, bool kFlip>
struct WeightRow {
  int first, step;  // taps
  int row, col;     // of tap b: col + b · kFlip

  __device__ WeightRow(const TiledInvolution& p, const Tile& tile, int a)
      : first(kFlip ? (K - 1 - a) * K + K - 1 : a * K),
        step(kFlip ? -1 : 1),
        row(kFlip ? tile.row + p.offset_h + a : tile.row),
        col(kFlip ? tile.col + p.offset_w : tile.col) {}
};

// Calls f(element of the weight, element of shared memory) for every weight of a row of the kernel,
// K · 4 a thread; `inside` is false beyond the image.
template <int K, bool kFlip, typename F>
__device__ void for_each_weight(const TiledInvolution& p, const Tile& tile, const TileLayout& at,
                                int a, const F& f) {
  const WeightRow<K, kFlip> taps(p, tile, a);
  const TiledImage& image = p.weight;
  const auto visit = [&](int b, int r, int x) {
    const int h = taps.row + r, w = taps.col + x + (kFlip ? b : 0);
    const bool inside = h >= 0 && h < image.h && w >= 0 && w < image.w;
    f((taps.first + b * taps.step) * image.channel + h * image.row + w * image.pixel,
      b * at.taps + r * at.width + x, inside);
  };
  if (image.pixel == 1) {
#pragma unroll
    for (int b = 0; b < K; ++b) {
#pragma unroll
      for (int i = 0; i < kTilePixels; ++i) {
        visit(b, tile.y, threadIdx.x + i * blockDim.x);
      }
    }
  } else {  // adjacent taps to adjacent threads
#pragma unroll 4
    for (int i = 0; i < K * kTilePixels; ++i) {
      const int index = thread_index() + i * blockDim.x * blockDim.y;
      visit(index % K, index / K / at.width, index / K % at.width);
    }
  }
}

template <int K, bool kFlip, typename T>
__device__ void stage_weights(const T* __restrict__ weight, const TiledInvolution& p,
                              const Tile& tile, const TileLayout& at, int a,
                              float* __restrict__ to) {
  if (!kFlip && p.weight_fours) {
    const int h = tile.row + tile.y, w = tile.col + tile.x;
    const bool inside = h < p.weight.h && w < p.weight.w;
#pragma unroll
    for (int b = 0; b < K; ++b) {
      Vector<T, kTilePixels> v{};
      if (inside) {
        v = *reinterpret_cast<const Vector<T, kTilePixels>*>(
            weight + (a * K + b) * p.weight.channel + h * p.weight.row + w);
      }
      float* lane = to + b * at.taps + tile.y * at.width + tile.x;
      *reinterpret_cast<float4*>(lane) =
          make_float4(static_cast<float>(v.lane[0]), static_cast<float>(v.lane[1]),
                      static_cast<float>(v.lane[2]), static_cast<float>(v.lane[3]));
    }
    return;
  }
  for_each_weight<K, kFlip>(p, tile, at, a, [&](int from, int lane, bool inside) {
    to[lane] = inside ? static_cast<float>(weight[from]) : 0.f;
  });
}

// The pixels of a source's row that K taps of 4 outputs take, and those that 16-byte loads add.
template <int K>
struct SourceRow {
  static constexpr int kSize = round_up(kTilePixels + K - 1, 4);
  float lane[kSize];

  __device__ explicit SourceRow(const float* from) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      reinterpret_cast<float4&>(lane[i]) = *reinterpret_cast<const float4*>(from + i);
    }
  }
};

// Stores those of 4 adjacent values that are there.
template <typename T>
__device__ void store_four(T* to, const float (&values)[4], int there, bool fours) {
  if (fours && there >= 4) {
    Vector<T, 4> v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.lane[i] = static_cast<T>(values[i]);
    }
    *reinterpret_cast<Vector<T, 4>*>(to) = v;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < there) {
      to[i] = static_cast<T>(values[i]);
    }
  }
}

template <typename T>
__device__ void store_tile(const float (&sum)[kTileChannels][kTilePixels], T* out,
                           const TiledImage& image, int h, int w, int channels, bool fours) {
  if (h >= image.h) {
    return;
  }
  T* to = out + h * image.row + w * image.pixel;
  if (image.pixel == 1) {
#pragma unroll
    for (int c = 0; c < kTileChannels; ++c) {
      if (c < channels) {
        store_four(to + c * image.channel, sum[c], image.w - w, fours);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTilePixels; ++i) {
#pragma unroll
    for (int c = 0; c < kTileChannels; c += 4) {
      const float four[4] = {sum[c][i], sum[c + 1][i], sum[c + 2][i], sum[c + 3][i]};
      if (w + i < image.w) {
        store_four(to + i * image.pixel + c, four, channels - c, fours);
      }
    }
  }
}

// The involution or, kFlip, its input gradient: the same with the kernel's taps in reverse and each
// tap's weights moved along with the source.
template <typename T, int K, bool kFlip>
__global__ void __launch_bounds__(kTileThreads, 3)
    involve_tile_kernel(TiledInvolution p, const T* __restrict__ source,
                        const T* __restrict__ weight, T* __restrict__ out) {
  extern __shared__ float4 shared[];
  const TileLayout at(blockDim.x, K);
  float* window = reinterpret_cast<float*>(shared);
  float* weights = window + kTileChannels * at.window;
  const Tile tile(p);
  weight = tile.start(weight, p.weight, tile.group * K * K);
  for (int first = 0; first < p.channels; first += kTileChannels) {
    const int channels = min(kTileChannels, p.channels - first);
    const int channel = tile.group * p.channels + first;
    __syncthreads();
    stage_image<kTileRows + K - 1>(tile.start(source, p.source, channel), p.source,
                                   tile.row + p.offset_h, tile.col + p.offset_w, channels, window,
                                   at.pitch, at.window);
    float sum[kTileChannels][kTilePixels] = {};
#pragma unroll 1
    for (int a = 0; a < K; ++a) {
      __syncthreads();
      stage_weights<K, kFlip>(weight, p, tile, at, a, weights);
      __syncthreads();
      float4 factor[K];
#pragma unroll
      for (int b = 0; b < K; ++b) {
        factor[b] =
            *reinterpret_cast<const float4*>(weights + b * at.taps + tile.y * at.width + tile.x);
      }
      const float* row = window + (tile.y + a) * at.pitch + tile.x;
#pragma unroll
      for (int c = 0; c < kTileChannels; ++c) {
        if (c >= channels) {
          break;
        }
        const SourceRow<K> x(row + c * at.window);
#pragma unroll
        for (int b = 0; b < K; ++b) {
          sum[c][0] += factor[b].x * x.lane[b];
          sum[c][1] += factor[b].y * x.lane[b + 1];
          sum[c][2] += factor[b].z * x.lane[b + 2];
          sum[c][3] += factor[b].w * x.lane[b + 3];
        }
      }
    }
    store_tile(sum, tile.start(out, p.out, channel), p.out, tile.row + tile.y, tile.col + tile.x,
               channels, p.out_fours);
  }
}

// The weight gradient: a row of the kernel at a time, the sum over the group's channels.
template <typename T, int K>
__global__ void __launch_bounds__(kTileThreads, 2)
    involve_tile_weight_kernel(TiledInvolution p, const T* __restrict__ x,
                               const T* __restrict__ grad, T* __restrict__ grad_weight) {
  extern __shared__ float4 shared[];
  const TileLayout at(blockDim.x, K);
  float* window = reinterpret_cast<float*>(shared);
  float* grads = window + p.channels * at.window;
  float* weights = grads + p.channels * at.grad;
  const Tile tile(p);
  const int channel = tile.group * p.channels;
  grad_weight = tile.start(grad_weight, p.weight, tile.group * K * K);
  stage_image<kTileRows + K - 1>(tile.start(x, p.source, channel), p.source, tile.row + p.offset_h,
                                 tile.col + p.offset_w, p.channels, window, at.pitch, at.window);
  stage_image<kTileRows>(tile.start(grad, p.out, channel), p.out, tile.row, tile.col, p.channels,
                         grads, at.pitch, at.grad);
  __syncthreads();
  const float* thread_grads = grads + tile.y * at.pitch + tile.x;
#pragma unroll 1
  for (int a = 0; a < K; ++a) {
    float4 sum[K] = {};
    const float* row = window + (tile.y + a) * at.pitch + tile.x;
#pragma unroll 2
    for (int c = 0; c < p.channels; ++c) {
      const float4 g = *reinterpret_cast<const float4*>(thread_grads + c * at.grad);
      const SourceRow<K> source(row + c * at.window);
#pragma unroll
      for (int b = 0; b < K; ++b) {
        sum[b].x += g.x * source.lane[b];
        sum[b].y += g.y * source.lane[b + 1];
        sum[b].z += g.z * source.lane[b + 2];
        sum[b].w += g.w * source.lane[b + 3];
      }
    }
#pragma unroll
    for (int b = 0; b < K; ++b) {
      *reinterpret_cast<float4*>(weights + b * at.taps + tile.y * at.width + tile.x) = sum[b];
    }
    __syncthreads();
    for_each_weight<K, false>(p, tile, at, a, [&](int to, int lane, bool inside) {
      if (inside) {
        grad_weight[to] = static_cast<T>(weights[lane]);
      }
    });
    __syncthreads();
  }
}

}  // namespace ops::cuda
