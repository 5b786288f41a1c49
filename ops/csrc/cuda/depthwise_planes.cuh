// Depthwise convolution of contiguous images. What a block works on, whole planes (one image
// channel each) or a band of rows of one, is one contiguous span of memory: it moves to shared
// memory and back in 16-byte granules whatever the width, while other spans are at work.
#pragma once

#include <cuda_fp16.h>

#include <optional>

#include "depthwise_stencil.cuh"
#include "span_ring.cuh"

namespace ops::cuda {

struct PlaneLaunch {
  int in_h, in_w, out_h, out_w;
  int start_h, start_w;  // image coordinate of the first output's first input
  int across, down;      // tiles of a plane's outputs, or of a band's; a thread each
  int bands;             // of a plane; more than 1 only where group is 1
  int group;             // planes at a time
  int channels;
  int planes;
  int in_bytes, out_bytes;  // of shared memory for a span, each with a guard behind it
};

constexpr int kPlaneThreads = 256;    // at most; 128 where a row of tiles is no longer
constexpr int kThreadsAtATime = 512;  // on a multiprocessor, with 128 registers each
constexpr int kGuard = 128;           // bytes that windows at an edge reach over a span,
constexpr int kMostPadding = 8;       // where there is no more padding than this

// A thread computes a tile of kRows × kCols outputs. Odd steps along a row spread the threads of a
// warp over the banks of shared memory, and 7 divides the usual 7, 14, 28, 56, 112, 224.
template <typename Axis>
struct PlaneTile {
  static constexpr bool kTransposed = Axis::step(8) == 4;
  static constexpr int kRows = kTransposed || Axis::kTaps == 7 ? 4
                               : Axis::step(1) == 2            ? 5
                                                               : 7;  // as registers allow
  static constexpr int kCols = kTransposed ? 14 : 7;
  static constexpr int kInRows = Axis::inputs(kRows);
  static constexpr int kInCols = Axis::inputs(kCols);
  static constexpr int kTaps = Axis::kTaps * Axis::kTaps;
};

// The planes, and rows of them, that a block works on next.
struct PlaneRange {
  int plane, planes;
  int out_row, out_rows;
  int in_row, in_rows;

  template <typename Axis>
  __device__ static PlaneRange at(Axis, const PlaneLaunch& launch, int plane, int planes,
                                  int band) {
    PlaneRange range{plane, planes, 0, launch.out_h, 0, launch.in_h};
    if (launch.bands > 1) {
      const int rows = launch.down * PlaneTile<Axis>::kRows;
      range.out_row = band * rows;
      range.out_rows = min(rows, launch.out_h - range.out_row);
      const int first = launch.start_h + Axis::step(range.out_row);
      range.in_row = min(max(first, 0), launch.in_h);
      range.in_rows = max(0, min(first + Axis::inputs(rows), launch.in_h) - range.in_row);
    }
    return range;
  }
};

struct PlaneSize {
  int h, w;

  // Rows of neighbouring planes of a tensor.
  template <typename T>
  __device__ Span<T> span(T* tensor, int all_planes, int plane, int planes, int row,
                          int rows) const {
    const int64_t size = static_cast<int64_t>(h) * w;
    return {tensor + plane * size + static_cast<int64_t>(row) * w, planes * rows * w,
            tensor + all_planes * size};
  }
};

// Elements that may be outside the image are masked on the way to float32, at the price of one
// integer instruction.
template <typename T>
struct Mask;

template <>
struct Mask<float> {
  static constexpr unsigned kKeep = ~0u;
  static __device__ float apply(float x, unsigned mask) {
    return __uint_as_float(__float_as_uint(x) & mask);
  }
};

template <>
struct Mask<BFloat16> {
  static constexpr unsigned kKeep = 1u << 16;  // the upper half of a float32
  static __device__ float apply(BFloat16 x, unsigned mask) { return __uint_as_float(x.x * mask); }
};

template <>
struct Mask<Half> {
  static constexpr unsigned kKeep = 0xffff;
  static __device__ float apply(Half x, unsigned mask) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(x.x & mask)));
  }
};

// Which of kCount columns from `first` on are inside an image.
template <typename T, int kCount>
struct ColumnMasks {
  unsigned mask[kCount];

  __device__ ColumnMasks(int first, int width) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      mask[i] =
          static_cast<unsigned>(first + i) < static_cast<unsigned>(width) ? Mask<T>::kKeep : 0;
    }
  }

  __device__ void load(const T* from, float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = Mask<T>::apply(from[i], mask[i]);
    }
  }
};

// Shared memory of both kernels: the ring's, zeros for rows outside the image (and the guard before
// the first buffer), then the buffers.
template <int kBuffers, typename T>
struct PlaneMemory {
  static constexpr int kZeros = SpanRing<kBuffers>::kBytes / sizeof(T);  // offset in elements
  static constexpr int kFirst = kZeros + kGuard / sizeof(T);
  static constexpr size_t kBytes = kFirst * sizeof(T);

  static __device__ T* clear(unsigned char* memory) {
    T* shared = reinterpret_cast<T*>(memory);
    for (int i = kZeros + threadIdx.x; i < kFirst; i += blockDim.x) {
      shared[i] = T(0);
    }
    return shared;
  }
};

// The filter of a channel, and the bias.
template <int kTaps, typename T>
struct Filter {
  float tap[kTaps];
  float bias;

  __device__ void load(const T* __restrict__ weight, const T* __restrict__ bias_data, int channel,
                       bool flip) {
    weight += channel * kTaps;
    float given[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      given[i] = static_cast<float>(weight[i]);
    }
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      tap[i] = flip ? given[kTaps - 1 - i] : given[i];
    }
    bias = bias_data ? static_cast<float>(bias_data[channel]) : 0.0f;
  }
};

constexpr int kPlaneBuffers = 3;  // two on their way in, one at work or on its way out

struct PlanePlan {
  PlaneLaunch launch;
  int threads;
  int at_a_time;  // blocks that run together
  int ranges;     // of all planes
  size_t shared;

  // At most that many blocks; preferably so many that each meets the same channels again.
  int blocks() const {
    const int period = launch.channels / launch.group * launch.bands;
    const bool periodic = launch.channels % launch.group == 0 && period <= at_a_time;
    return std::min(ranges, periodic ? at_a_time / period * period : at_a_time);
  }
};

// How to cut planes into ranges, where as much is done `repeats` times. A buffer holds a range
// of inputs and of outputs in one place, or, where `apart`, side by side. Nothing where a row of
// tiles is too long for a block, or the padding too wide.
template <typename Axis>
std::optional<PlanePlan> plan_planes(int64_t planes, int64_t channels, int64_t in_h, int64_t in_w,
                                     int64_t out_h, int64_t out_w, int64_t padding_h,
                                     int64_t padding_w, int64_t repeats, int64_t element_size,
                                     bool apart, size_t fixed_bytes) {
  using Tile = PlaneTile<Axis>;
  if (padding_w > kMostPadding) {
    return std::nullopt;
  }
  const Device device;
  const int across = ceil_div(out_w, Tile::kCols);
  const int down = ceil_div(out_h, Tile::kRows);
  const int most_threads = across <= kPlaneThreads / 2 ? kPlaneThreads / 2 : kPlaneThreads;
  std::optional<PlanePlan> best;
  double least = 0;
  // Whole planes, then fewer of them, then bands.
  int group = std::min<int64_t>(std::max(1, most_threads / (across * down)), planes);
  for (int bands = 1, last = 0; bands <= down && across <= most_threads;) {
    PlanePlan plan{};
    PlaneLaunch& launch = plan.launch;
    launch.in_h = in_h, launch.in_w = in_w, launch.out_h = out_h, launch.out_w = out_w;
    launch.start_h = Axis::start(padding_h), launch.start_w = Axis::start(padding_w);
    launch.channels = channels, launch.planes = planes;
    launch.across = across;
    launch.down = ceil_div(down, bands);
    launch.bands = ceil_div(down, launch.down);
    launch.group = group;
    const int64_t in_rows =
        launch.bands == 1 ? in_h : std::min<int64_t>(in_h, Axis::inputs(launch.down * Tile::kRows));
    const int64_t out_rows = std::min<int64_t>(out_h, launch.down * Tile::kRows);
    const auto bytes = [&](int64_t elements) {
      return ceil_div(elements * element_size, kGranule) * kGranule + kGranule + kGuard;
    };
    const size_t in_bytes = bytes(group * in_rows * in_w);
    const size_t out_bytes = bytes(group * out_rows * out_w);
    plan.threads = round_up(group * across * launch.down, 32);
    plan.shared = fixed_bytes + (apart ? kAhead * (in_bytes + out_bytes)
                                       : kPlaneBuffers * std::max(in_bytes, out_bytes));
    if (launch.down != last && plan.threads <= most_threads && plan.shared <= device.block_shared) {
      launch.in_bytes = in_bytes, launch.out_bytes = out_bytes;
      const int on_one =
          std::min<int>(kThreadsAtATime / plan.threads, device.shared / (plan.shared + 1024));
      plan.at_a_time = on_one * device.multiprocessors;
      plan.ranges = ceil_div(planes, group) * launch.bands;
      // Rounds, each as long as what a multiprocessor does in it, and a latency.
      const double cost = 1.0 * ceil_div(plan.ranges * repeats, plan.at_a_time) *
                          (on_one * plan.threads * (launch.bands > 1 ? 1.2 : 1.0) + 128);
      if (!best || cost < least) {
        best = plan, least = cost;
      }
    }
    if (group > 1) {
      group /= 2;
    } else {
      last = launch.down;
      bands *= 2;
    }
  }
  return best;
}

}  // namespace ops::cuda
