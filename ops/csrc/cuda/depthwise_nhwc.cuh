// Depthwise convolution of channels-last images.
#pragma once

#include "depthwise_conv.h"
#include "depthwise_stencil.cuh"

namespace ops::cuda {

// A launch over images, in tiles of outputs × chunks of channels.
struct ImageLaunch {
  int in_h, in_w, out_h, out_w;
  int first_h, first_w;    // image coordinate of the top left staged input of the first tile
  int across, down;        // threads a tile, each kCols × kRows outputs
  int tiles_h, tiles_w;    // tiles an image
  int window_h, window_w;  // inputs staged a tile
  int lanes;               // threads across a chunk of channels, kChannels each
  int chunks;
  int channels;
  size_t shared_bytes;
  int load_vector;    // elements a staged access
  bool store_vector;  // whether pixels take vectors of kChannels
};

constexpr int kChannels = 4;  // a thread's channels

// A thread computes kRows × kCols outputs of kChannels channels from windows in shared memory.
template <typename Axis>
struct ImageStencil {
  static constexpr int kRows = 2;
  static constexpr int kCols = Axis::kTaps >= 5 && Axis::step(4) == 4 ? 7 : 4;  // divides 7, 14, 28, 56
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kInCols = Axis::inputs(kCols);
};

// Copies window_h × window_w pixels of `count` channels to shared memory, `pitch` elements a pixel,
// zero outside the image and past the last channel. V divides every offset.
template <int V, typename T>
__device__ void stage_pixels(T* shared, const T* __restrict__ image, int height, int width,
                             int channels, int first_h, int first_w, int window_h, int window_w,
                             int count, int pitch) {
  const int per_pixel = pitch / V;
  int c = threadIdx.x % per_pixel;
  int w = threadIdx.x / per_pixel % window_w;
  int h = threadIdx.x / per_pixel / window_w;
  const int step_c = blockDim.x % per_pixel;
  const int step_w = blockDim.x / per_pixel;
  while (h < window_h) {
    const int y = first_h + h;
    const int x = first_w + w;
    const bool inside = y >= 0 && y < height && x >= 0 && x < width && c * V < count;
    T* to = shared + (h * window_w + w) * pitch + c * V;
    const T* from =
        image + (inside ? (static_cast<int64_t>(y) * width + x) * channels + c * V : 0);
    if constexpr (V * sizeof(T) >= 4) {
      __pipeline_memcpy_async(to, from, V * sizeof(T), inside ? 0 : V * sizeof(T));
    } else {
      *to = inside ? *from : T(0);
    }
    c += step_c;
    w += step_w;
    if (c >= per_pixel) {
      c -= per_pixel;
      ++w;
    }
    while (w >= window_w) {
      w -= window_w;
      ++h;
    }
  }
}

// `image` is where the image's chunk of `count` channels begins.
template <typename T>
__device__ void stage_image(const ImageLaunch& launch, T* shared, const T* image, int height,
                            int width, int first_h, int first_w, int window_h, int window_w,
                            int count) {
  const auto pixels = [&](auto v) {
    stage_pixels<decltype(v)::value>(shared, image, height, width, launch.channels, first_h,
                                     first_w, window_h, window_w, count, launch.lanes * kChannels);
  };
  switch (launch.load_vector) {
    case 4: return pixels(Width<4>{});
    case 2: return pixels(Width<2>{});
    default: return pixels(Width<1>{});
  }
}

template <typename Axis, typename T>
__global__ void __launch_bounds__(kMaxThreads)
    image_kernel(ImageLaunch launch, bool flip, const T* __restrict__ in, const T* __restrict__ weight,
                 const T* __restrict__ bias, T* __restrict__ out) {
  using Stencil = ImageStencil<Axis>;
  constexpr int kRows = Stencil::kRows, kCols = Stencil::kCols, kTaps = Stencil::kTaps;
  extern __shared__ __align__(16) unsigned char shared[];
  const int pitch = launch.lanes * kChannels;
  float* weights = reinterpret_cast<float*>(shared);  // [kTaps][pitch]
  T* window = reinterpret_cast<T*>(weights + kTaps * pitch);

  int block = blockIdx.x;
  const int chunk = block % launch.chunks;
  block /= launch.chunks;
  const int tile_w = block % launch.tiles_w;
  block /= launch.tiles_w;
  const int tile_h = block % launch.tiles_h;
  const int64_t n = block / launch.tiles_h;
  const int first_channel = chunk * pitch;
  const int count = min(pitch, launch.channels - first_channel);

  stage_image(launch, window,
              in + n * launch.in_h * launch.in_w * launch.channels + first_channel, launch.in_h,
              launch.in_w, launch.first_h + tile_h * Axis::step(launch.down * kRows),
              launch.first_w + tile_w * Axis::step(launch.across * kCols), launch.window_h,
              launch.window_w, count);
  for (int i = threadIdx.x; i < kTaps * count; i += blockDim.x) {
    const int tap = i % kTaps;
    weights[(flip ? kTaps - 1 - tap : tap) * pitch + i / kTaps] =
        static_cast<float>(weight[static_cast<int64_t>(first_channel) * kTaps + i]);
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();

  const int c = threadIdx.x % launch.lanes * kChannels;
  const int col = threadIdx.x / launch.lanes % launch.across * kCols;
  const int row = threadIdx.x / launch.lanes / launch.across * kRows;
  if (row >= launch.down * kRows || c >= count) {
    return;
  }
  float sum[kRows][kCols][kChannels];
#pragma unroll
  for (int v = 0; v < kChannels; ++v) {
    const float initial =
        bias && c + v < count ? static_cast<float>(bias[first_channel + c + v]) : 0.0f;
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        sum[q][j][v] = initial;
      }
    }
  }
  const T* from = window + (Axis::step(row) * launch.window_w + Axis::step(col)) * pitch + c;
#pragma unroll
  for (int r = 0; r < Stencil::kInRows; ++r) {
    float x[Stencil::kInCols][kChannels];
#pragma unroll
    for (int i = 0; i < Stencil::kInCols; ++i) {
      const auto pixel =
          *reinterpret_cast<const Vector<T, kChannels>*>(from + (r * launch.window_w + i) * pitch);
#pragma unroll
      for (int v = 0; v < kChannels; ++v) {
        x[i][v] = static_cast<float>(pixel.lane[v]);
      }
    }
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const int a = Axis::tap(q, r);
      if (a < 0) {
        continue;
      }
#pragma unroll
      for (int b = 0; b < Axis::kTaps; ++b) {
        const float4 w =
            *reinterpret_cast<const float4*>(weights + (a * Axis::kTaps + b) * pitch + c);
#pragma unroll
        for (int i = 0; i < Stencil::kInCols; ++i) {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            if (Axis::tap(j, i) == b) {
              sum[q][j][0] += w.x * x[i][0];
              sum[q][j][1] += w.y * x[i][1];
              sum[q][j][2] += w.z * x[i][2];
              sum[q][j][3] += w.w * x[i][3];
            }
          }
        }
      }
    }
  }

#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const int h = tile_h * launch.down * kRows + row + q;
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      const int w = tile_w * launch.across * kCols + col + j;
      if (h >= launch.out_h || w >= launch.out_w) {
        continue;
      }
      T* to = out + ((n * launch.out_h + h) * launch.out_w + w) * launch.channels + first_channel + c;
      Vector<T, kChannels> pixel;
#pragma unroll
      for (int v = 0; v < kChannels; ++v) {
        pixel.lane[v] = static_cast<T>(sum[q][j][v]);
      }
      if (launch.store_vector) {
        *reinterpret_cast<Vector<T, kChannels>*>(to) = pixel;
      } else {
#pragma unroll
        for (int v = 0; v < kChannels; ++v) {
          if (c + v < count) {
            to[v] = pixel.lane[v];
          }
        }
      }
    }
  }
}

// How to cut images into tiles of at most `max_items` thread tiles that take at most kMaxSharedBytes,
// bytes(window pixels, output pixels) a channel: the cheapest in pixels staged and computed.
template <typename Axis, typename Stencil, typename Bytes>
ImageLaunch plan_images(const DepthwiseGeometry& g, int64_t in_h, int64_t in_w, int64_t out_h,
                        int64_t out_w, int64_t padding_h, int64_t padding_w, int max_lanes,
                        int max_items, const Bytes& bytes) {
  ImageLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w, launch.out_h = out_h, launch.out_w = out_w;
  launch.first_h = Axis::start(padding_h);
  launch.first_w = Axis::start(padding_w);
  launch.channels = g.c;
  const int vectors = ceil_div(g.c, kChannels);
  launch.chunks = ceil_div(vectors, max_lanes);
  launch.lanes = ceil_div(vectors, launch.chunks);
  double least = 0;
  for (int across = 1; across <= max_items && (across - 1) * Stencil::kCols < out_w; ++across) {
    for (int down = 1; down * across <= max_items && (down - 1) * Stencil::kRows < out_h; ++down) {
      const int tile_h = down * Stencil::kRows, tile_w = across * Stencil::kCols;
      const int window_h = Axis::step(tile_h - Stencil::kRows) + Stencil::kInRows;
      const int window_w = Axis::step(tile_w - Stencil::kCols) + Stencil::kInCols;
      const int tiles_h = ceil_div(out_h, tile_h), tiles_w = ceil_div(out_w, tile_w);
      const double cost = static_cast<double>(tiles_h) * tiles_w *
                          (window_h * window_w + 2 * tile_h * tile_w + 64);
      const size_t shared = bytes(window_h * window_w, tile_h * tile_w) * launch.lanes * kChannels;
      if (shared <= kMaxSharedBytes && (least == 0 || cost < least)) {
        least = cost;
        launch.across = across, launch.down = down;
        launch.tiles_h = tiles_h, launch.tiles_w = tiles_w;
        launch.window_h = window_h, launch.window_w = window_w;
        launch.shared_bytes = shared;
      }
    }
  }
  return launch;
}

}  // namespace ops::cuda
