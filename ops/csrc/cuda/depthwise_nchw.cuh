// Depthwise convolution of contiguous images.
#pragma once

#include <cuda_pipeline.h>

#include <utility>

#include "depthwise_stencil.cuh"

namespace ops::cuda {

// A launch over planes (one image channel each), in tiles of outputs. A block has
// (tile_w / kCols) × (tile_h / kRows) × planes threads.
struct PlaneLaunch {
  int in_h, in_w, out_h, out_w;
  int first_h, first_w;    // image coordinate of the top left staged input of the first tile
  int tile_h, tile_w;      // outputs a tile
  int tiles_h, tiles_w;    // tiles a plane
  int window_h, window_w;  // inputs staged a tile; window_w is the pitch in shared memory
  int row_threads_log2;    // threads that copy one row of a window
  int channels;
  int planes;
  int load_vector;    // elements a staged access
  bool store_vector;  // whether rows of outputs take vectors of 4
};

constexpr int kPlaneThreads = 128;  // small blocks, so that some load while others compute

// A thread computes kRows × kCols outputs of one plane from a window staged in shared memory.
template <typename Axis>
struct PlaneStencil {
  static constexpr bool kTransposed = Axis::step(8) == 4;
  static constexpr int kRows = kTransposed ? 4 : 7;  // 7 divides the usual 7, 14, 28, 56
  static constexpr int kCols = kTransposed ? 8 : 4;  // the window moves by whole vectors of 4
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
  static constexpr int kWeights = round_up(kTaps, 4);
  // Inputs staged before a window so that, with "same" padding, image column 0 is at a vector.
  static constexpr int kLead = (Axis::start(Axis::kSamePadding) % 4 + 4) % 4;
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kVectors = round_up(kLead + Axis::inputs(kCols), 4) / 4;
};

// Copies a window of a plane, whose top left corner is (first_h, first_w), to shared memory, zero
// outside the plane. Done by `threads` threads, this one their `thread`-th. V divides first_w and
// width, so that no vector straddles the plane's edge.
template <int V, typename T>
__device__ void stage_rows(T* shared, const T* __restrict__ plane, int height, int width,
                           int first_h, int first_w, int window_h, int window_w,
                           int row_threads_log2, int thread, int threads) {
  const int first_row = thread >> row_threads_log2;
  const int step = threads >> row_threads_log2;
  if (first_row >= step) {
    return;
  }
  const int lane = thread & ((1 << row_threads_log2) - 1);
  for (int i = lane * V; i < window_w; i += V << row_threads_log2) {
    const int w = first_w + i;
    const int rows = w >= 0 && w < width ? height : 0;  // no row is inside a column that is not
    T* to = shared + first_row * window_w + i;
    const T* from = plane + (first_h + first_row) * width + w;
#pragma unroll 4
    for (int r = first_row; r < window_h; r += step) {
      const bool inside = static_cast<unsigned>(first_h + r) < static_cast<unsigned>(rows);
      if constexpr (V * sizeof(T) >= 4) {
        __pipeline_memcpy_async(to, inside ? from : plane, V * sizeof(T),
                                inside ? 0 : V * sizeof(T));
      } else {
        *to = inside ? *from : T(0);
      }
      to += step * window_w;
      from += step * width;
    }
  }
}

template <typename T, typename... Args>
__device__ void stage(int vector, T* shared, const T* plane, Args... args) {
  switch (vector) {
    case 4: return stage_rows<4>(shared, plane, args...);
    case 2: return stage_rows<2>(shared, plane, args...);
    default: return stage_rows<1>(shared, plane, args...);
  }
}

template <int kVectors, typename T>
__device__ void load_row(const T* from, float (&x)[kVectors * 4]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto four = *reinterpret_cast<const Vector<T, 4>*>(from + v * 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[v * 4 + k] = static_cast<float>(four.lane[k]);
    }
  }
}

template <typename Axis, typename T>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_kernel(PlaneLaunch launch, bool flip, const T* __restrict__ in,
                 const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  using Stencil = PlaneStencil<Axis>;
  constexpr int kRows = Stencil::kRows, kCols = Stencil::kCols, kTaps = Stencil::kTaps;
  constexpr int kWeights = Stencil::kWeights;
  extern __shared__ __align__(16) unsigned char memory[];
  float* weights = reinterpret_cast<float*>(memory);
  T* windows = reinterpret_cast<T*>(weights + blockDim.z * kWeights);

  const int tile_w = blockIdx.y % launch.tiles_w;
  const int tile_h = blockIdx.y / launch.tiles_w;
  const int first_plane = blockIdx.x * blockDim.z;
  const int planes = min(static_cast<int>(blockDim.z), launch.planes - first_plane);
  const int p = threadIdx.z;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  T* window = windows + p * launch.window_h * launch.window_w;
  if (p < planes) {
    stage(launch.load_vector, window,
          in + static_cast<int64_t>(first_plane + p) * launch.in_h * launch.in_w, launch.in_h,
          launch.in_w, launch.first_h + tile_h * Axis::step(launch.tile_h),
          launch.first_w + tile_w * Axis::step(launch.tile_w), launch.window_h, launch.window_w,
          launch.row_threads_log2, thread, threads);
  }
  const int channel = (first_plane + p) % launch.channels;
  if (p < planes) {
    for (int tap = thread; tap < kTaps; tap += threads) {
      weights[p * kWeights + (flip ? kTaps - 1 - tap : tap)] =
          static_cast<float>(weight[channel * kTaps + tap]);
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();

  if (p >= planes) {
    return;
  }
  const int row = threadIdx.y * kRows;
  const int col = threadIdx.x * kCols;

  float w[kWeights];
#pragma unroll
  for (int i = 0; i < kWeights; i += 4) {
    *reinterpret_cast<float4*>(w + i) =
        *reinterpret_cast<const float4*>(weights + p * kWeights + i);
  }
  const float initial = bias ? static_cast<float>(bias[channel]) : 0.0f;
  float sum[kRows][kCols];
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      sum[q][j] = initial;
    }
  }
  window += Axis::step(row) * launch.window_w + Axis::step(col);
#pragma unroll
  for (int r = 0; r < Stencil::kInRows; ++r) {
    float x[Stencil::kVectors * 4];
    load_row<Stencil::kVectors>(window + r * launch.window_w, x);
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
  T* plane = out + static_cast<int64_t>(first_plane + p) * launch.out_h * launch.out_w;
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    const int h = tile_h * launch.tile_h + row + q;
    if (h >= launch.out_h) {
      return;
    }
    T* to = plane + h * launch.out_w + w0;
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

// How to cut `planes` planes into blocks; bytes(window inputs, tile outputs) is what one plane
// takes of shared memory. Returns the launch and the block.
template <typename Axis, typename Bytes>
std::pair<PlaneLaunch, dim3> plan_planes(int64_t planes, int64_t channels, int64_t in_h,
                                         int64_t in_w, int64_t out_h, int64_t out_w,
                                         int64_t padding_h, int64_t padding_w, const Bytes& bytes) {
  using Stencil = PlaneStencil<Axis>;
  PlaneLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w, launch.out_h = out_h, launch.out_w = out_w;
  launch.first_h = Axis::start(padding_h);
  launch.first_w = Axis::start(padding_w) - Stencil::kLead;
  launch.channels = channels;
  launch.planes = planes;
  // Tiles of equal size, at most 64 inputs wide and as high as fits.
  const int max_w = Axis::step(64) > 64 ? 32 : 64;
  launch.tiles_w = ceil_div(out_w, max_w);
  launch.tile_w = round_up(ceil_div(out_w, launch.tiles_w), Stencil::kCols);
  launch.window_w = Axis::step(launch.tile_w - Stencil::kCols) + Stencil::kVectors * 4;
  const int across = launch.tile_w / Stencil::kCols;
  int down = std::min<int64_t>(kPlaneThreads / across, ceil_div(out_h, Stencil::kRows));
  const auto shared = [&](int rows) {
    launch.tile_h = rows * Stencil::kRows;
    launch.window_h = Axis::step(launch.tile_h - Stencil::kRows) + Stencil::kInRows;
    return bytes(launch.window_h * launch.window_w, launch.tile_h * launch.tile_w);
  };
  while (down > 1 && shared(down) > kSharedBytes) {
    --down;
  }
  launch.tiles_h = ceil_div(out_h, down * Stencil::kRows);
  down = ceil_div(ceil_div(out_h, launch.tiles_h), Stencil::kRows);
  const int64_t in_block =
      std::min<int64_t>(kPlaneThreads / (across * down), kSharedBytes / shared(down));
  const int64_t z = std::max<int64_t>(1, std::min({in_block, planes, int64_t{64}}));
  const int row_threads = std::min(launch.window_w / 4, across * down);
  while (launch.row_threads_log2 < 5 && 2 << launch.row_threads_log2 <= row_threads) {
    ++launch.row_threads_log2;
  }
  return {launch, dim3(across, down, z)};
}

}  // namespace ops::cuda
