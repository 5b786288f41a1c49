// Depthwise convolution of channels-last images. A thread owns a few channels of a strip a few
// columns wide and marches down it: every input row is read once and added to all the output rows
// that it reaches, which wait in registers until they are complete. Rows come through a ring in
// shared memory that is filled several steps ahead.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>
#include <utility>

#include "depthwise_stencil.cuh"

namespace ops::cuda {

// A block has lanes × groups × images threads: the lanes' channels lie side by side, and so do the
// groups' strips. It marches down one segment of its images.
struct StripLaunch {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // image coordinate of the first output's first input
  int tiles_w;           // blocks across an image
  int segments;          // blocks down an image
  int steps;             // a segment's length, in groups of output rows that complete together
  int images;
  int channels;
  int window_w;    // pixels of a staged row of inputs
  int ahead;       // steps that the ring is filled ahead; it has one more place
  int copy_bytes;  // of a staged access
  bool vector;     // whether pixels are stored as vectors
};

// What a march along Axis keeps in registers. One step takes kStepIn new rows of inputs, completes
// kStepOut rows of outputs, and touches kPending rows of outputs in all.
template <typename Axis>
struct March {
  static constexpr int kTaps = Axis::kTaps;
  static constexpr int kChannels = kTaps <= 3 ? 4 : 2;
  static constexpr int kCols = kTaps <= 3 ? 4 : (Axis::step(2) == 2 ? 7 : 4);
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kStepOut = Axis::step(2) == 1 ? 2 : 1;
  static constexpr int kStepIn = Axis::step(kStepOut);
  static constexpr int kWindow = Axis::inputs(kStepOut);

  // The tap between pending output row m and new input row r, or -1.
  static constexpr int tap(int m, int r) { return Axis::tap(m, kWindow - kStepIn + r); }

  static constexpr int pending() {
    int rows = 0;
    for (int m = 0; m < kTaps * 4; ++m) {
      for (int r = 0; r < kStepIn; ++r) {
        rows = tap(m, r) >= 0 ? m + 1 : rows;
      }
    }
    return round_up(rows, kStepOut);
  }
  static constexpr int kPending = pending();
  // Steps before the first one that completes rows of the strip.
  static constexpr int kWarmUp = kPending / kStepOut - 1;
};

constexpr int kStripThreads = 128;

// Which part of which image a block works on.
struct StripPlace {
  int tile, segment;
  int64_t n;
  int first_channel, count;  // the block's channels

  __device__ StripPlace(const StripLaunch& launch, int channels_per_lane)
      : tile(blockIdx.x % launch.tiles_w),
        segment(blockIdx.x / launch.tiles_w % launch.segments),
        n(blockIdx.x / launch.tiles_w / launch.segments * blockDim.z + threadIdx.z),
        first_channel(blockIdx.y * blockDim.x * channels_per_lane),
        count(min(static_cast<int>(blockDim.x) * channels_per_lane,
                  launch.channels - first_channel)) {}
};

// Copies rows of `pixels` pixels from image column `first` on, `count` channels of each, to shared
// memory, zero outside the image. Each thread copies the same channels of every step-th pixel.
template <typename T>
struct RowCopier {
  int bytes;          // an access
  int pixel, pixels;  // this thread's first, and their number
  int step;
  int first, width;  // image columns
  int pitch;         // elements of a staged pixel
  int channel;
  int64_t channels;  // elements of an image's pixel

  __device__ RowCopier(const StripLaunch& launch, int first, int pixels, int width, int pitch,
                       int count)
      : bytes(launch.copy_bytes),
        pixels(pixels),
        first(first),
        width(width),
        pitch(pitch),
        channels(launch.channels) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int lanes = bytes / static_cast<int>(sizeof(T));
    const int accesses = pitch / lanes;
    channel = thread % accesses * lanes;
    pixel = thread / accesses;
    step = blockDim.x * blockDim.y / accesses;
    if (pixel >= step || channel >= count) {
      pixel = pixels;
    }
  }

  // `row` is the image's column 0.
  __device__ void copy(T* shared, const T* __restrict__ row) const {
    switch (bytes) {
      case 16: return copy_by<16>(shared, row);
      case 8: return copy_by<8>(shared, row);
      case 4: return copy_by<4>(shared, row);
      default: return copy_by<2>(shared, row);
    }
  }

 private:
  template <int kBytes>
  __device__ void copy_by(T* shared, const T* __restrict__ row) const {
    T* to = shared + pixel * pitch + channel;
    const T* from = row + (first + pixel) * channels + channel;
#pragma unroll 4
    for (int p = pixel; p < pixels; p += step) {
      const bool inside = static_cast<unsigned>(first + p) < static_cast<unsigned>(width);
      if constexpr (kBytes >= 4) {
        __pipeline_memcpy_async(to, inside ? from : row, kBytes, inside ? 0 : kBytes);
      } else {
        *to = inside ? *from : T(0);
      }
      to += step * pitch;
      from += step * channels;
    }
  }
};

template <int V, int kColumns, typename T>
__device__ void load_pixels(const T* from, int pitch, float (&x)[kColumns][V]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const auto pixel = *reinterpret_cast<const Vector<T, V>*>(from + i * pitch);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[i][v] = static_cast<float>(pixel.lane[v]);
    }
  }
}

// Waits until all but the newest `ahead` steps have arrived, in whole powers the compiler can
// count.
__device__ inline void wait_for_step(int ahead) {
  switch (ahead) {
    case 1: __pipeline_wait_prior(0); break;
    case 2: __pipeline_wait_prior(1); break;
    case 3: __pipeline_wait_prior(2); break;
    default: __pipeline_wait_prior(3); break;
  }
  __syncthreads();
}

template <typename Axis, typename T>
__global__ void __launch_bounds__(kStripThreads)
    strip_kernel(StripLaunch launch, bool flip, const T* __restrict__ in,
                 const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  using M = March<Axis>;
  constexpr int V = M::kChannels, kCols = M::kCols, kTaps = M::kTaps, kPending = M::kPending;
  extern __shared__ __align__(16) unsigned char memory[];
  const int pitch = blockDim.x * V;
  float* weights = reinterpret_cast<float*>(memory);  // [kTaps · kTaps][pitch]
  const int row_size = launch.window_w * pitch;
  T* ring = reinterpret_cast<T*>(weights + round_up(kTaps * kTaps * pitch, 4)) +
            threadIdx.z * (launch.ahead + 1) * M::kStepIn * row_size;

  const StripPlace at(launch, V);
  const int64_t in_row = static_cast<int64_t>(launch.in_w) * launch.channels;
  const int64_t out_row = static_cast<int64_t>(launch.out_w) * launch.channels;
  const int first_w = launch.start_w + Axis::step(at.tile * blockDim.y * kCols);
  const int h0 = at.segment * launch.steps * M::kStepOut;
  const int last_step = min(launch.steps, (launch.out_h - h0 + M::kStepOut - 1) / M::kStepOut);
  const int first_h = launch.start_h + Axis::step(h0) + M::kWindow - M::kStepIn;
  in += at.n * launch.in_h * in_row + at.first_channel;

  const RowCopier<T> copier(launch, first_w, launch.window_w, launch.in_w, pitch,
                            at.n < launch.images ? at.count : 0);
  const auto stage = [&](int step) {
    const int slot = (step + M::kWarmUp) % (launch.ahead + 1);
#pragma unroll
    for (int r = 0; r < M::kStepIn; ++r) {
      const int y = first_h + step * M::kStepIn + r;
      if (step < last_step && y >= 0 && y < launch.in_h) {
        copier.copy(ring + (slot * M::kStepIn + r) * row_size, in + y * in_row);
      }
    }
    __pipeline_commit();
  };
  for (int step = -M::kWarmUp; step < launch.ahead - M::kWarmUp; ++step) {
    stage(step);
  }
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  for (int i = thread; i < kTaps * kTaps * at.count; i += blockDim.x * blockDim.y * blockDim.z) {
    const int tap = i % (kTaps * kTaps);
    weights[(flip ? kTaps * kTaps - 1 - tap : tap) * pitch + i / (kTaps * kTaps)] =
        static_cast<float>(weight[at.first_channel * kTaps * kTaps + i]);
  }

  const int w0 = (at.tile * blockDim.y + threadIdx.y) * kCols;
  const int c = at.first_channel + threadIdx.x * V;
  const bool here = at.n < launch.images && c < launch.channels;
  out += at.n * launch.out_h * out_row + static_cast<int64_t>(w0) * launch.channels + c;
  const float* w = weights + threadIdx.x * V;
  const int offset = Axis::step(threadIdx.y * kCols) * pitch + threadIdx.x * V;

  float initial[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    initial[v] = bias && c + v < launch.channels ? static_cast<float>(bias[c + v]) : 0.0f;
  }
  float sum[kPending][kCols][V];
#pragma unroll
  for (int m = 0; m < kPending; ++m) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sum[m][j][v] = initial[v];
      }
    }
  }
  for (int step = -M::kWarmUp; step < last_step; ++step) {
    wait_for_step(launch.ahead);
    stage(step + launch.ahead);
    const int h = h0 + step * M::kStepOut;  // the first output row that this step completes
    const int slot = (step + M::kWarmUp) % (launch.ahead + 1);
#pragma unroll
    for (int r = 0; r < M::kStepIn; ++r) {
      const int y = first_h + step * M::kStepIn + r;
      if (y < 0 || y >= launch.in_h) {
        continue;
      }
      float x[M::kInCols][V];
      load_pixels<V>(ring + (slot * M::kStepIn + r) * row_size + offset, pitch, x);
#pragma unroll
      for (int m = 0; m < kPending; ++m) {
        const int a = M::tap(m, r);
        if (a < 0) {
          continue;
        }
#pragma unroll
        for (int b = 0; b < kTaps; ++b) {
          const auto tap = *reinterpret_cast<const Vector<float, V>*>(w + (a * kTaps + b) * pitch);
#pragma unroll
          for (int i = 0; i < M::kInCols; ++i) {
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
              if (Axis::tap(j, i) == b) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                  sum[m][j][v] += tap.lane[v] * x[i][v];
                }
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M::kStepOut; ++m) {
      if (step < 0 || h + m >= launch.out_h || !here) {
        continue;
      }
      T* to = out + (h + m) * out_row;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        Vector<T, V> pixel;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          pixel.lane[v] = static_cast<T>(sum[m][j][v]);
        }
        if (w0 + j >= launch.out_w) {
          continue;
        }
        if (launch.vector) {
          *reinterpret_cast<Vector<T, V>*>(to + j * launch.channels) = pixel;
        } else {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            if (c + v < launch.channels) {
              to[j * launch.channels + v] = pixel.lane[v];
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kPending; ++m) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum[m][j][v] = m + M::kStepOut < kPending ? sum[m + M::kStepOut][j][v] : initial[v];
        }
      }
    }
  }
}

// How to cut images into blocks.
struct StripPlan {
  StripLaunch launch;
  dim3 grid, block;
  size_t ring_bytes;
};

// A step of the march stages kStepIn rows of inputs and `out_rows` rows of outputs.
template <typename Axis, typename M, typename T>
StripPlan plan_strips(int64_t images, int64_t channels, int64_t in_h, int64_t in_w, int64_t out_h,
                      int64_t out_w, int64_t padding_h, int64_t padding_w, int out_rows,
                      int blocks_at_a_time, std::initializer_list<const void*> pointers) {
  StripLaunch launch{};
  launch.in_h = in_h, launch.in_w = in_w, launch.out_h = out_h, launch.out_w = out_w;
  launch.start_h = Axis::start(padding_h);
  launch.start_w = Axis::start(padding_w);
  launch.images = images;
  launch.channels = channels;
  // 128 bytes of channels a block, the strips of a whole row and then more images as they fit.
  const int64_t vectors = ceil_div(channels, M::kChannels);
  const int most = std::min<int>(16, 128 / (M::kChannels * sizeof(T)));
  const int chunks = ceil_div(vectors, most);
  const int lanes = ceil_div(vectors, chunks);
  const int64_t across = ceil_div(out_w, M::kCols);
  const size_t pitch_bytes = lanes * M::kChannels * sizeof(T);
  launch.copy_bytes = 16;
  const auto divides = [&](size_t n) { return n % launch.copy_bytes == 0; };
  while (launch.copy_bytes > static_cast<int>(sizeof(T)) &&
         !(divides(channels * sizeof(T)) && divides(pitch_bytes) &&
           std::all_of(pointers.begin(), pointers.end(),
                       [&](const void* p) { return divides(reinterpret_cast<uintptr_t>(p)); }))) {
    launch.copy_bytes /= 2;
  }
  launch.vector = launch.copy_bytes >= static_cast<int>(M::kChannels * sizeof(T));
  // The threads must suffice to copy one pixel, and three steps must fit into the ring.
  constexpr size_t kRingBytes = 32 * 1024;
  const int least_groups = M::kChannels * sizeof(T) / launch.copy_bytes;
  int groups = 0;
  size_t step_bytes = 0;
  for (launch.tiles_w = ceil_div(across, kStripThreads / lanes); groups == 0; ++launch.tiles_w) {
    groups = std::max<int>(least_groups, ceil_div(across, launch.tiles_w));
    launch.window_w = Axis::step((groups - 1) * M::kCols) + M::kInCols;
    step_bytes = pitch_bytes * (launch.window_w * M::kStepIn + groups * M::kCols * out_rows);
    if (3 * step_bytes > kRingBytes && groups > least_groups) {
      groups = 0;
    }
  }
  launch.tiles_w = ceil_div(across, groups);
  const int z =
      std::max<int64_t>(1, std::min<int64_t>({kStripThreads / (lanes * groups), 64, images,
                                              int64_t{kRingBytes / (3 * step_bytes)}}));
  launch.ahead = std::max<int64_t>(1, std::min<int64_t>(4, kRingBytes / (step_bytes * z) - 1));
  // Long segments read few rows twice, but blocks of them may fill the device badly.
  const int64_t all_steps = ceil_div(out_h, M::kStepOut);
  const int64_t blocks = ceil_div(images, z) * launch.tiles_w * chunks;
  launch.segments =
      best_split(all_steps, blocks, blocks_at_a_time, M::kWarmUp + 2, all_steps / (M::kWarmUp + 1));
  launch.steps = ceil_div(all_steps, launch.segments);
  launch.segments = ceil_div(all_steps, launch.steps);
  return {launch, dim3(ceil_div(images, z) * launch.tiles_w * launch.segments, chunks),
          dim3(lanes, groups, z), step_bytes * z * (launch.ahead + 1)};
}

}  // namespace ops::cuda
