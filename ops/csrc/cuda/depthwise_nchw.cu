#include "depthwise_partials.cuh"
#include "depthwise_paths.cuh"
#include "depthwise_planes.cuh"

namespace ops::cuda {
namespace {

template <typename Axis, typename T>
__global__ void __launch_bounds__(kPlaneThreads, 2)
    plane_kernel(PlaneLaunch launch, bool flip, const T* __restrict__ in,
                 const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out) {
  using Tile = PlaneTile<Axis>;
  using Memory = PlaneMemory<kPlaneBuffers, T>;
  constexpr int kRows = Tile::kRows, kCols = Tile::kCols;
  extern __shared__ __align__(kGuard) unsigned char memory[];
  SpanRing<kPlaneBuffers> ring(memory);
  T* shared = Memory::clear(memory);
  const int buffer_size = max(launch.in_bytes, launch.out_bytes) / sizeof(T);
  const int col = threadIdx.x % launch.across * kCols;
  const int row = threadIdx.x / launch.across % launch.down * kRows;
  const int p = threadIdx.x / (launch.across * launch.down);
  const int in_col = launch.start_w + Axis::step(col);
  const ColumnMasks<T, Tile::kInCols> inside(in_col, launch.in_w);
  const PlaneSize in_size{launch.in_h, launch.in_w}, out_size{launch.out_h, launch.out_w};

  const int items = (launch.planes + launch.group - 1) / launch.group * launch.bands;
  const auto range_of = [&](int item) {
    const int part = launch.bands == 1 ? item : item / launch.bands;
    const int plane = part * launch.group;
    return PlaneRange::at(Axis{}, launch, plane, min(launch.group, launch.planes - plane),
                          item - part * launch.bands);
  };
  const auto source = [&](const PlaneRange& range) {
    return in_size.span(in, launch.planes, range.plane, range.planes, range.in_row, range.in_rows);
  };
  const auto load = [&](int item, int turn) {
    const bool any = item < items;
    ring.load(any, shared + Memory::kFirst + turn * buffer_size, source(range_of(any ? item : 0)));
  };
  for (int i = 0; i < kAhead; ++i) {
    load(blockIdx.x + i * gridDim.x, i);
  }
  __syncthreads();

  Filter<Tile::kTaps, T> filter;
  int loaded = -1;
  int turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const PlaneRange range = range_of(item);
    const bool here = p < range.planes;
    const int channel = (range.plane + (here ? p : 0)) % launch.channels;
    if (channel != loaded) {  // seldom: see plan_planes
      filter.load(weight, bias, channel, flip);
      loaded = channel;
    }
    float sum[kRows][kCols];
    const int buffer = Memory::kFirst + turn * buffer_size;
    ring.wait();
    if (here) {
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          sum[q][j] = filter.bias;
        }
      }
      const int y = launch.start_h + Axis::step(range.out_row + row);
      const int window = buffer + source(range).skew() +
                         (p * range.in_rows + y - range.in_row) * launch.in_w + in_col;
#pragma unroll
      for (int r = 0; r < Tile::kInRows; ++r) {
        float x[Tile::kInCols];
        const bool within = static_cast<unsigned>(y + r) < static_cast<unsigned>(launch.in_h);
        inside.load(shared + (within ? window + r * launch.in_w : Memory::kZeros), x);
        join_row<Axis, Axis, kRows, kCols, Tile::kInCols>(
            r, [&](int q, int j, int tap, int i) { sum[q][j] += filter.tap[tap] * x[i]; });
      }
    }
    __syncthreads();  // the inputs are read: the outputs take their place

    const auto target =
        out_size.span(out, launch.planes, range.plane, range.planes, range.out_row, range.out_rows);
    if (here) {
      T* to = shared + buffer + target.skew() + (p * range.out_rows + row) * launch.out_w + col;
      const int rows = range.out_rows - row, cols = launch.out_w - col;
      if (rows >= kRows && cols >= kCols) {
#pragma unroll
        for (int q = 0; q < kRows; ++q, to += launch.out_w) {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            to[j] = static_cast<T>(sum[q][j]);
          }
        }
      } else {
#pragma unroll
        for (int q = 0; q < kRows; ++q, to += launch.out_w) {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            if (q < rows && j < cols) {
              to[j] = static_cast<T>(sum[q][j]);
            }
          }
        }
      }
    }
    ring.store(shared + buffer, target);
    turn = (turn + 1) % kPlaneBuffers;
    load(item + kAhead * gridDim.x, (turn + 1) % kPlaneBuffers);
  }
  ring.finish();
}

// Block (range of channels, split) goes through every gridDim.y-th image, and each thread through
// the same tile of them all.
template <typename Axis, typename T>
__global__ void __launch_bounds__(kPlaneThreads, 2)
    plane_weight_kernel(PlaneLaunch launch, int images, const T* __restrict__ x,
                        const T* __restrict__ grad, float* __restrict__ partial) {
  using Tile = PlaneTile<Axis>;
  constexpr int kRows = Tile::kRows, kCols = Tile::kCols, kTaps = Tile::kTaps;
  using Memory = PlaneMemory<kAhead, T>;
  extern __shared__ __align__(kGuard) unsigned char memory[];
  SpanRing<kAhead> ring(memory);
  T* shared = Memory::clear(memory);
  const int buffer_size = (launch.in_bytes + launch.out_bytes) / sizeof(T);
  const int grad_offset = launch.in_bytes / sizeof(T);
  const int col = threadIdx.x % launch.across * kCols;
  const int row = threadIdx.x / launch.across % launch.down * kRows;
  const int p = threadIdx.x / (launch.across * launch.down);
  const int in_col = launch.start_w + Axis::step(col);
  const ColumnMasks<T, Tile::kInCols> inside(in_col, launch.in_w);
  const ColumnMasks<T, kCols> grad_inside(col, launch.out_w);
  const PlaneSize in_size{launch.in_h, launch.in_w}, out_size{launch.out_h, launch.out_w};

  const int first_channel = blockIdx.x / launch.bands * launch.group;
  const int channels = min(launch.group, launch.channels - first_channel);
  const int planes = images * launch.channels;
  const auto range_of = [&](int n) {
    return PlaneRange::at(Axis{}, launch, n * launch.channels + first_channel, channels,
                          blockIdx.x % launch.bands);
  };
  const auto source = [&](const PlaneRange& range) {
    return in_size.span(x, planes, range.plane, range.planes, range.in_row, range.in_rows);
  };
  const auto grad_source = [&](const PlaneRange& range) {
    return out_size.span(grad, planes, range.plane, range.planes, range.out_row, range.out_rows);
  };
  const auto load = [&](int n, int turn) {
    const bool any = n < images;
    const PlaneRange range = range_of(any ? n : 0);
    T* buffer = shared + Memory::kFirst + turn * buffer_size;
    ring.load(any, buffer, source(range), buffer + grad_offset, grad_source(range));
  };

  float sum[kTaps + 1] = {};
  for (int i = 0; i < kAhead; ++i) {
    load(blockIdx.y + i * gridDim.y, i);
  }
  __syncthreads();
  int turn = 0;
  for (int n = blockIdx.y; n < images; n += gridDim.y, turn ^= 1) {
    ring.wait();
    if (p < channels) {
      const PlaneRange range = range_of(n);
      const int buffer = Memory::kFirst + turn * buffer_size;
      const int grads = buffer + grad_offset + grad_source(range).skew() +
                        (p * range.out_rows + row) * launch.out_w + col;
      float g[kRows][kCols];
#pragma unroll
      for (int q = 0; q < kRows; ++q) {
        grad_inside.load(
            shared + (row + q < range.out_rows ? grads + q * launch.out_w : Memory::kZeros), g[q]);
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          sum[kTaps] += g[q][j];
        }
      }
      const int y = launch.start_h + Axis::step(range.out_row + row);
      const int window = buffer + source(range).skew() +
                         (p * range.in_rows + y - range.in_row) * launch.in_w + in_col;
#pragma unroll
      for (int r = 0; r < Tile::kInRows; ++r) {
        float in[Tile::kInCols];
        const bool within = static_cast<unsigned>(y + r) < static_cast<unsigned>(launch.in_h);
        inside.load(shared + (within ? window + r * launch.in_w : Memory::kZeros), in);
        join_row<Axis, Axis, kRows, kCols, Tile::kInCols>(
            r, [&](int q, int j, int tap, int i) { sum[tap] += g[q][j] * in[i]; });
      }
    }
    __syncthreads();
    load(n + kAhead * gridDim.y, turn);
  }

  // Every thread's sums, side by side for each tap, then over the tiles of a channel, 8 lanes a
  // sum.
  float* by_tile = reinterpret_cast<float*>(shared + Memory::kFirst);
  const int pitch = blockDim.x + 8;  // 8 lanes on in the banks, from sum to sum
#pragma unroll
  for (int i = 0; i <= kTaps; ++i) {
    by_tile[i * pitch + threadIdx.x] = sum[i];
  }
  __syncthreads();
  const int tiles = launch.across * launch.down;
  const int lane = threadIdx.x % 8;
  const int sums = channels * (kTaps + 1);
  for (int first = 0; first < sums; first += blockDim.x / 8) {
    const int i = first + threadIdx.x / 8;
    const int channel = i / (kTaps + 1), tap = i % (kTaps + 1);
    float total = 0;
    for (int tile = lane; tile < tiles && i < sums; tile += 8) {
      total += by_tile[tap * pitch + channel * tiles + tile];
    }
#pragma unroll
    for (int lanes = 4; lanes > 0; lanes /= 2) {
      total += __shfl_down_sync(~0u, total, lanes, 8);
    }
    if (lane == 0 && i < sums) {
      const int64_t split =
          static_cast<int64_t>(blockIdx.y) * launch.bands + blockIdx.x % launch.bands;
      partial[(split * launch.channels + first_channel) * (kTaps + 1) + i] = total;
    }
  }
}

}  // namespace

template <typename T>
bool convolve_planes(const Convolution<T>& c) {
  return dispatch_axis(c.g, c.transposed, [&](auto axis) {
    using Axis = decltype(axis);
    const auto plan =
        plan_planes<Axis>(c.g.n * c.g.c, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h,
                          c.padding_w, 1, sizeof(T), false, PlaneMemory<kPlaneBuffers, T>::kBytes);
    if (plan) {
      launch_kernel(plane_kernel<Axis, T>, plan->blocks(), plan->threads, plan->shared, c.stream,
                    plan->launch, c.flip, c.in.data, c.weight, c.bias, c.out.data);
    }
    return plan.has_value();
  });
}

template <typename T>
bool sum_weights_planes(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  return dispatch_direct(g, [&](auto axis) {
    using Axis = decltype(axis);
    constexpr int kTaps = Axis::kTaps * Axis::kTaps;
    using Memory = PlaneMemory<kAhead, T>;
    const auto plan = plan_planes<Axis>(g.c, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h,
                                        g.padding_w, g.n, sizeof(T), true, Memory::kBytes);
    if (!plan) {
      return false;
    }
    const int64_t images = best_split(g.n, plan->ranges, plan->at_a_time, 2, g.n);
    const int64_t splits = images * plan->launch.bands;
    Tensor partial = empty_partials(c, splits);
    const size_t sums = sizeof(float) * (kTaps + 1) * (plan->threads + 8);
    launch_kernel(plane_weight_kernel<Axis, T>, dim3(plan->ranges, images), plan->threads,
                  std::max(plan->shared, Memory::kBytes + sums), c.stream, plan->launch,
                  static_cast<int>(g.n), c.x, c.grad, partial.mutable_data_ptr<float>());
    add_partials(c, partial);
    return true;
  });
}

template bool convolve_planes(const Convolution<float>&);
template bool convolve_planes(const Convolution<Half>&);
template bool convolve_planes(const Convolution<BFloat16>&);
template bool sum_weights_planes(const WeightGradient<float>&);
template bool sum_weights_planes(const WeightGradient<Half>&);
template bool sum_weights_planes(const WeightGradient<BFloat16>&);

}  // namespace ops::cuda
