// Depthwise convolution of contiguous images.
#pragma once

#include "depthwise_stencil.cuh"

namespace ops::cuda {

// A launch over planes (one image channel each), in tiles of outputs.
struct PlaneLaunch {
  int in_h, in_w, out_h, out_w;
  int first_h, first_w;    // image coordinate of the top left staged input of the first tile
  int tile_h, tile_w;      // outputs a tile
  int tiles_h, tiles_w;    // tiles a plane
  int window_h, window_w;  // inputs staged a tile; window_w is the pitch in shared memory
  int planes_per_block;
  int channels;
  int64_t planes;
  int load_vector;    // elements a staged access
  bool store_vector;  // whether rows of outputs take vectors of 4
};

// A thread computes kRows × kCols outputs of one plane from windows staged in shared memory.
template <typename Axis>
struct PlaneStencil {
  static constexpr int kRows = 4;
  static constexpr int kCols = Axis::step(8) == 4 ? 8 : 4;  // the window moves by whole vectors of 4
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  // Inputs staged before a window so that, with "same" padding, image column 0 is at a vector.
  static constexpr int kLead = (Axis::start(Axis::kSamePadding) % 4 + 4) % 4;
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kVectors = round_up(kLead + Axis::inputs(kCols), 4) / 4;
};

template <typename Axis, typename T>
__global__ void __launch_bounds__(kMaxThreads)
    plane_kernel(PlaneLaunch launch, bool flip, const T* __restrict__ in, const T* __restrict__ weight,
                 const T* __restrict__ bias, T* __restrict__ out) {
  using Stencil = PlaneStencil<Axis>;
  constexpr int kRows = Stencil::kRows, kCols = Stencil::kCols, kTaps = Stencil::kTaps;
  constexpr int kWeights = round_up(kTaps, 4);
  extern __shared__ __align__(16) unsigned char shared[];
  float* weights = reinterpret_cast<float*>(shared);
  T* windows = reinterpret_cast<T*>(weights + launch.planes_per_block * kWeights);

  int block = blockIdx.x;
  const int tile_w = block % launch.tiles_w;
  block /= launch.tiles_w;
  const int tile_h = block % launch.tiles_h;
  const int64_t first_plane =
      static_cast<int64_t>(block / launch.tiles_h) * launch.planes_per_block;
  const int planes =
      static_cast<int>(min(static_cast<int64_t>(launch.planes_per_block), launch.planes - first_plane));

  const int64_t in_size = static_cast<int64_t>(launch.in_h) * launch.in_w;
  stage(
      launch.load_vector, windows, in, [=](int p) { return (first_plane + p) * in_size; }, planes,
      launch.in_h, launch.in_w, launch.first_h + tile_h * Axis::step(launch.tile_h),
      launch.first_w + tile_w * Axis::step(launch.tile_w), launch.window_h, launch.window_w);
  for (int i = threadIdx.x; i < planes * kTaps; i += blockDim.x) {
    const int tap = i % kTaps;
    const int64_t channel = (first_plane + i / kTaps) % launch.channels;
    weights[i / kTaps * kWeights + (flip ? kTaps - 1 - tap : tap)] =
        static_cast<float>(weight[channel * kTaps + tap]);
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();

  const int across = launch.tile_w / kCols;
  const int down = launch.tile_h / kRows;
  const int p = threadIdx.x / (across * down);
  if (p >= planes) {
    return;
  }
  const int row = threadIdx.x / across % down * kRows;
  const int col = threadIdx.x % across * kCols;
  const int64_t plane = first_plane + p;

  float w[kWeights];
#pragma unroll
  for (int i = 0; i < kWeights; i += 4) {
    *reinterpret_cast<float4*>(w + i) =
        *reinterpret_cast<const float4*>(weights + p * kWeights + i);
  }
  const float initial = bias ? static_cast<float>(bias[plane % launch.channels]) : 0.0f;
  float sum[kRows][kCols];
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      sum[q][j] = initial;
    }
  }
  const T* window =
      windows + (p * launch.window_h + Axis::step(row)) * launch.window_w + Axis::step(col);
#pragma unroll
  for (int r = 0; r < Stencil::kInRows; ++r) {
    float x[Stencil::kVectors * 4];
#pragma unroll
    for (int v = 0; v < Stencil::kVectors; ++v) {
      const auto four = *reinterpret_cast<const Vector<T, 4>*>(window + r * launch.window_w + v * 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        x[v * 4 + k] = static_cast<float>(four.lane[k]);
      }
    }
#pragma unroll
    for (int q = 0; q < kRows; ++q) {
      const int a = Axis::tap(q, r);
      if (a < 0) {
        continue;
      }
#pragma unroll
      for (int i = 0; i < Axis::inputs(kCols); ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const int b = Axis::tap(j, i);
          if (b >= 0) {
            sum[q][j] += w[a * Axis::kTaps + b] * x[Stencil::kLead + i];
          }
        }
      }
    }
  }

  const int w0 = tile_w * launch.tile_w + col;
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const int h = tile_h * launch.tile_h + row + q;
    if (h >= launch.out_h) {
      return;
    }
    T* to = out + (plane * launch.out_h + h) * launch.out_w + w0;
#pragma unroll
    for (int j = 0; j < kCols; j += 4) {
      if (launch.store_vector && w0 + j < launch.out_w) {
        Vector<T, 4> four;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          four.lane[k] = static_cast<T>(sum[q][j + k]);
        }
        *reinterpret_cast<Vector<T, 4>*>(to + j) = four;
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (w0 + j + k < launch.out_w) {
            to[j + k] = static_cast<T>(sum[q][j + k]);
          }
        }
      }
    }
  }
}

// How to cut planes of in_h × in_w inputs and out_h × out_w outputs, convolved with `padding` zeros
// around them, into blocks.
template <typename Axis>
PlaneLaunch plan_planes(int64_t planes, int64_t channels, int64_t in_h, int64_t in_w, int64_t out_h,
                        int64_t out_w, int64_t padding_h, int64_t padding_w) {
  using Stencil = PlaneStencil<Axis>;
  PlaneLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w, launch.out_h = out_h, launch.out_w = out_w;
  launch.first_h = Axis::start(padding_h);
  launch.first_w = Axis::start(padding_w) - Stencil::kLead;
  launch.channels = channels;
  launch.planes = planes;
  // Tiles of equal size, at most 64 wide, that kMaxThreads threads cover and 48 KB hold.
  const int max_w = Axis::step(64) > 64 ? 32 : 64;
  launch.tiles_w = ceil_div(out_w, max_w);
  launch.tile_w = round_up(ceil_div(out_w, launch.tiles_w), Stencil::kCols);
  const int across = launch.tile_w / Stencil::kCols;
  const int max_h = kMaxThreads / across * Stencil::kRows / (Axis::step(64) > 64 ? 2 : 1);
  launch.tiles_h = ceil_div(out_h, max_h);
  launch.tile_h = round_up(ceil_div(out_h, launch.tiles_h), Stencil::kRows);
  launch.window_h = Axis::step(launch.tile_h - Stencil::kRows) + Stencil::kInRows;
  launch.window_w = Axis::step(launch.tile_w - Stencil::kCols) + Stencil::kVectors * 4;
  launch.planes_per_block =
      std::max(1, kMaxThreads / (across * (launch.tile_h / Stencil::kRows)));
  return launch;
}

}  // namespace ops::cuda
