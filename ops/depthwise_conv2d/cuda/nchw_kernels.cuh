// The kernels for contiguous images, whatever a tile is.
#pragma once

#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/nchw_stage.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {

template <typename Tile>
__global__ void __launch_bounds__(kPlaneThreads, Tile::Shape::kThreadsAtATime / kPlaneThreads)
    plane_kernel(PlaneLaunch launch, bool flip, const typename Tile::T* __restrict__ in,
                 const typename Tile::T* __restrict__ weight,
                 const typename Tile::T* __restrict__ bias, typename Tile::T* __restrict__ out) {
  using T = typename Tile::T;
  using Memory = PlaneMemory<kPlaneBuffers, T>;
  using Walk = PlaneWalk<typename Tile::Axis, Tile::Shape::kRows>;
  extern __shared__ __align__(kGuard) unsigned char memory[];
  SpanRing<kPlaneBuffers> ring(memory);
  T* shared = Memory::clear(memory);
  const int buffer_size = max(launch.in_bytes, launch.out_bytes) / sizeof(T);
  Tile tile(launch);
  const Planes<const T> inputs(in, launch.planes, launch.in_h, launch.in_w);
  const Planes<T> outputs(out, launch.planes, launch.out_h, launch.out_w);
  Walk walk(launch);
  // Begins to load the range that is so many after the next one.
  const auto load = [&](int ahead, int turn) {
    if (ring.loads()) {
      Walk there = walk;
      for (int i = 0; i < ahead; ++i) {
        there.advance();
      }
      const PlaneRange range = there.range();
      ring.load(there.any(), shared + Memory::kFirst + turn * buffer_size,
                inputs.span(range.plane, range.planes, range.in_row, range.in_rows));
    }
  };
  for (int i = 0; i < kAhead; ++i) {
    load(i, i);
  }
  __syncthreads();

  int loaded = -1;
  int turn = 0;
  for (; walk.any(); walk.advance()) {
    const PlaneRange range = walk.range();
    const bool here = tile.plane() < range.planes;
    const int channel = walk.channel(here ? tile.plane() : 0);
    if (channel != loaded) {  // seldom where groups divide the channels: see PlanePlan::blocks
      tile.load_filter(weight, bias, channel, flip);
      loaded = channel;
    }
    const int buffer = Memory::kFirst + turn * buffer_size;
    ring.wait();
    if (here) {
      tile.convolve(shared, Memory::kZeros, buffer + inputs.skew(range.plane, range.in_row), range);
    }
    __syncthreads();  // the inputs are read: the outputs take their place

    const int skew = outputs.skew(range.plane, range.out_row);
    if (here) {
      tile.store(shared + buffer + skew, range);
    }
    ring.store(shared + buffer, skew, outputs.elements(range.planes, range.out_rows),
               [&] { return outputs.row(range.plane, range.out_row); });
    turn = (turn + 1) % kPlaneBuffers;
    load(kAhead, (turn + 1) % kPlaneBuffers);
  }
  ring.finish();
}

// Block (range of channels, split) goes through every gridDim.y-th image, and each tile through the
// same place of them all.
template <typename Sums>
__global__ void __launch_bounds__(kPlaneThreads, Sums::Shape::kThreadsAtATime / kPlaneThreads)
    plane_weight_kernel(PlaneLaunch launch, int images, const typename Sums::T* __restrict__ x,
                        const typename Sums::T* __restrict__ grad,
                        WeightTotals<typename Sums::T> totals) {
  using T = typename Sums::T;
  using Memory = PlaneMemory<kAhead, T>;
  extern __shared__ __align__(kGuard) unsigned char memory[];
  SpanRing<kAhead> ring(memory);
  T* shared = Memory::clear(memory);
  const int buffer_size = (launch.in_bytes + launch.out_bytes) / sizeof(T);
  const int grad_offset = launch.in_bytes / sizeof(T);
  Sums sums(launch);
  const int band = blockIdx.x % launch.bands;
  const int first_channel = blockIdx.x / launch.bands * launch.group;
  const int channels = min(launch.group, launch.channels - first_channel);
  const int planes = images * launch.channels;
  const auto range_of = [&](int n) {
    return PlaneRange::at<typename Sums::Axis, Sums::Shape::kRows>(
        launch, n * launch.channels + first_channel, channels, band);
  };
  const Planes<const T> inputs(x, planes, launch.in_h, launch.in_w);
  const Planes<const T> outputs(grad, planes, launch.out_h, launch.out_w);
  const auto load = [&](int n, int turn) {
    if (ring.loads()) {
      const PlaneRange range = range_of(n);
      T* buffer = shared + Memory::kFirst + turn * buffer_size;
      ring.load(n < images, buffer,
                inputs.span(range.plane, range.planes, range.in_row, range.in_rows),
                buffer + grad_offset,
                outputs.span(range.plane, range.planes, range.out_row, range.out_rows));
    }
  };
  for (int i = 0; i < kAhead; ++i) {
    load(blockIdx.y + i * gridDim.y, i);
  }
  __syncthreads();

  int turn = 0;
  for (int n = blockIdx.y; n < images; n += gridDim.y, turn ^= 1) {
    ring.wait();
    if (sums.plane() < channels) {
      const PlaneRange range = range_of(n);
      const int buffer = Memory::kFirst + turn * buffer_size;
      sums.add(shared, Memory::kZeros, buffer + inputs.skew(range.plane, range.in_row),
               buffer + grad_offset + outputs.skew(range.plane, range.out_row), range);
    }
    __syncthreads();
    load(n + kAhead * gridDim.y, turn);
  }
  let_next_kernel_start();
  constexpr int kSums = Sums::kTaps + 1;
  BlockTotals<T> to(totals, blockIdx.y * launch.bands + band, first_channel, kSums);
  sums.total(reinterpret_cast<float*>(shared + Memory::kFirst), channels,
             [&](int i, float sum) { to.put(i, sum); });
  to.finish(channels * kSums);
}

template <typename Tile, typename T>
bool launch_planes(const Convolution<T>& c) {
  const auto plan = plan_planes<typename Tile::Axis, typename Tile::Shape>(
      c.g.n * c.g.c, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h, c.padding_w, 1,
      sizeof(T), false, PlaneMemory<kPlaneBuffers, T>::kBytes);
  if (plan) {
    launch_kernel(plane_kernel<Tile>, plan->blocks(), plan->threads, plan->shared, c.stream,
                  plan->launch, c.flip, c.in.data, c.weight, c.bias, c.out.data);
  }
  return plan.has_value();
}

template <typename Sums, typename T>
bool launch_plane_weights(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  using Memory = PlaneMemory<kAhead, T>;
  const auto plan = plan_planes<typename Sums::Axis, typename Sums::Shape>(
      g.c, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, g.n, sizeof(T), true,
      Memory::kBytes);
  if (!plan) {
    return false;
  }
  const int64_t images = best_split(g.n, plan->ranges, plan->at_a_time, 2);
  sum_splits(c, images * plan->launch.bands, true, [&](const WeightTotals<T>& totals) {
    launch_kernel(
        plane_weight_kernel<Sums>, dim3(plan->ranges, images), plan->threads,
        std::max(plan->shared, Memory::kBytes + sizeof(float) * Sums::floats(plan->threads)),
        c.stream, plan->launch, static_cast<int>(g.n), c.x, c.grad, totals);
  });
  return true;
}

}  // namespace ops::cuda
