// The kernels of nchw_fma and nchw_mma: stages of feature maps go through a ring buffer, a Tile
// computes them.
#pragma once

#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/nchw_stage.cuh"
#include "depthwise_conv2d/cuda/two_stage_reduction.cuh"

namespace ops::cuda {

template <typename Tile>
__global__ void __launch_bounds__(kNchwThreads, Tile::Shape::kThreadsPerSm / kNchwThreads)
    nchw_kernel(NchwParams params, bool flip, const typename Tile::T* __restrict__ in,
                const typename Tile::T* __restrict__ weight,
                const typename Tile::T* __restrict__ bias, typename Tile::T* __restrict__ out) {
  using T = typename Tile::T;
  using Memory = StageMemory<kStages, T>;
  using Walk = StageIterator<typename Tile::Axis, Tile::Shape::kRows>;
  extern __shared__ __align__(kGuard) unsigned char memory[];
  RingBuffer<kStages> ring(memory);
  T* shared = Memory::clear(memory);
  const int buffer_size = max(params.in_bytes, params.out_bytes) / sizeof(T);
  Tile tile(params);
  const FeatureMaps<const T> inputs(in, params.maps, params.in_h, params.in_w);
  const FeatureMaps<T> outputs(out, params.maps, params.out_h, params.out_w);
  Walk walk(params);
  // Begins to load the range that is so many after the next one.
  const auto load = [&](int ahead, int turn) {
    if (ring.issues_loads()) {
      Walk there = walk;
      for (int i = 0; i < ahead; ++i) {
        there.advance();
      }
      const StageRange range = there.range();
      ring.load(there.any(), shared + Memory::kFirst + turn * buffer_size,
                inputs.span(range.map, range.maps, range.in_row, range.in_rows));
    }
  };
  for (int i = 0; i < kPrefetchDistance; ++i) {
    load(i, i);
  }
  __syncthreads();

  int loaded = -1;
  int turn = 0;
  for (; walk.any(); walk.advance()) {
    const StageRange range = walk.range();
    const bool here = tile.map() < range.maps;
    const int channel = walk.channel(here ? tile.map() : 0);
    if (channel != loaded) {  // seldom where groups divide the channels: see NchwPlan::blocks
      tile.load_filter(weight, bias, channel, flip);
      loaded = channel;
    }
    const int buffer = Memory::kFirst + turn * buffer_size;
    ring.wait();
    if (here) {
      tile.convolve(shared, Memory::kZeros, buffer + inputs.skew(range.map, range.in_row), range);
    }
    __syncthreads();  // the inputs are read: the outputs take their place

    const int skew = outputs.skew(range.map, range.out_row);
    if (here) {
      tile.store(shared + buffer + skew, range);
    }
    ring.store(shared + buffer, skew, outputs.elements(range.maps, range.out_rows),
               [&] { return outputs.row(range.map, range.out_row); });
    turn = (turn + 1) % kStages;
    load(kPrefetchDistance, (turn + 1) % kStages);
  }
  ring.drain();
}

// Block (range of channels, split) goes through every gridDim.y-th image, and each tile through the
// same place of them all.
template <typename Sums>
__global__ void __launch_bounds__(kNchwThreads, Sums::Shape::kThreadsPerSm / kNchwThreads)
    nchw_weight_gradient_kernel(NchwParams params, int images,
                                const typename Sums::T* __restrict__ x,
                                const typename Sums::T* __restrict__ grad,
                                WeightReduction<typename Sums::T> reduction) {
  using T = typename Sums::T;
  using Memory = StageMemory<kPrefetchDistance, T>;
  extern __shared__ __align__(kGuard) unsigned char memory[];
  RingBuffer<kPrefetchDistance> ring(memory);
  T* shared = Memory::clear(memory);
  const int buffer_size = (params.in_bytes + params.out_bytes) / sizeof(T);
  const int grad_offset = params.in_bytes / sizeof(T);
  Sums sums(params);
  const int band = blockIdx.x % params.bands;
  const int first_channel = blockIdx.x / params.bands * params.group;
  const int channels = min(params.group, params.channels - first_channel);
  const int maps = images * params.channels;
  const auto range_of = [&](int n) {
    return StageRange::at<typename Sums::Axis, Sums::Shape::kRows>(
        params, n * params.channels + first_channel, channels, band);
  };
  const FeatureMaps<const T> inputs(x, maps, params.in_h, params.in_w);
  const FeatureMaps<const T> outputs(grad, maps, params.out_h, params.out_w);
  const auto load = [&](int n, int turn) {
    if (ring.issues_loads()) {
      const StageRange range = range_of(n);
      T* buffer = shared + Memory::kFirst + turn * buffer_size;
      ring.load(n < images, buffer, inputs.span(range.map, range.maps, range.in_row, range.in_rows),
                buffer + grad_offset,
                outputs.span(range.map, range.maps, range.out_row, range.out_rows));
    }
  };
  for (int i = 0; i < kPrefetchDistance; ++i) {
    load(blockIdx.y + i * gridDim.y, i);
  }
  __syncthreads();

  int turn = 0;
  for (int n = blockIdx.y; n < images; n += gridDim.y, turn ^= 1) {
    ring.wait();
    if (sums.map() < channels) {
      const StageRange range = range_of(n);
      const int buffer = Memory::kFirst + turn * buffer_size;
      sums.add(shared, Memory::kZeros, buffer + inputs.skew(range.map, range.in_row),
               buffer + grad_offset + outputs.skew(range.map, range.out_row), range);
    }
    __syncthreads();
    load(n + kPrefetchDistance * gridDim.y, turn);
  }
  trigger_dependent_launch();
  BlockSums<T> to(reduction, blockIdx.y * params.bands + band, first_channel);
  sums.total(reinterpret_cast<float*>(shared + Memory::kFirst), channels,
             [&](int i, float sum) { to.put(i, sum); });
}

template <typename Tile, typename T>
bool launch_nchw(const Convolution<T>& c) {
  const auto plan = plan_nchw<typename Tile::Axis, typename Tile::Shape>(
      c.g.n * c.g.c, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h, c.padding_w, 1,
      sizeof(T), false, StageMemory<kStages, T>::kBytes);
  if (plan) {
    c.launch(nchw_kernel<Tile>, plan->blocks(), plan->threads, plan->shared, plan->params, c.flip,
             c.in.data, c.weight, c.bias, c.out.data);
  }
  return plan.has_value();
}

template <typename Sums, typename T>
bool launch_nchw_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  using Memory = StageMemory<kPrefetchDistance, T>;
  const auto plan = plan_nchw<typename Sums::Axis, typename Sums::Shape>(
      g.c, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, g.n, sizeof(T), true,
      Memory::kBytes);
  if (!plan) {
    return false;
  }
  const int64_t images = best_split(g.n, plan->ranges, plan->resident_blocks, 2);
  two_stage_reduction(c, images * plan->params.bands, [&](const WeightReduction<T>& reduction) {
    launch_kernel(
        nchw_weight_gradient_kernel<Sums>, dim3(plan->ranges, images), plan->threads,
        std::max(plan->shared, Memory::kBytes + sizeof(float) * Sums::floats(plan->threads)),
        c.stream, plan->params, static_cast<int>(g.n), c.x, c.grad, reduction);
  });
  return true;
}

}  // namespace ops::cuda
