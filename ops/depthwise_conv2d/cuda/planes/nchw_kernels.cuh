// Kernels of nchw_fma and nchw_mma, templated on the tile (FmaTile, MmaTile) that computes a stage,
// and their launches. Figures: nchw_fma.cuh, mma_tile.cuh, mma_weight_gradient.cuh.
#pragma once

#include "depthwise_conv2d/cuda/families.cuh"
#include "depthwise_conv2d/cuda/planes/nchw_stage.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::cuda {

template <typename Tile>
__global__ void __launch_bounds__(kNchwThreads, Tile::Shape::kThreadsPerSm / kNchwThreads)
    nchw_kernel(NchwParams params, bool flip, const typename Tile::T* __restrict__ in,
                const typename Tile::T* __restrict__ weight,
                const typename Tile::T* __restrict__ bias, typename Tile::T* __restrict__ out) {
  using T = typename Tile::T;
  using Layout = StageLayout<kStages, T>;
  using Iterator = StageIterator<typename Tile::Axis, Tile::Shape::kRows>;
  extern __shared__ __align__(kGuardBytes) unsigned char memory[];
  RingBuffer<kStages> ring(memory);
  T* shared = Layout::clear(memory);
  const int buffer_size = max(params.in_bytes, params.out_bytes) / sizeof(T);
  Tile tile(params);
  const FeatureMaps<const T> inputs(in, params.maps, params.in_h, params.in_w);
  const FeatureMaps<T> outputs(out, params.maps, params.out_h, params.out_w);
  Iterator it(params);
  // Start to load the stage `ahead` iterations from now.
  const auto load = [&](int ahead, int slot) {
    if (ring.issues_loads()) {
      Iterator ahead_it = it;
      for (int i = 0; i < ahead; ++i) {
        ahead_it.advance();
      }
      const Stage stage = ahead_it.stage();
      ring.load(ahead_it.valid(), shared + Layout::kFirst + slot * buffer_size,
                inputs.span(stage.map, stage.maps, stage.in_row, stage.in_rows));
    }
  };
  for (int i = 0; i < kPrefetchDistance; ++i) {
    load(i, i);
  }
  __syncthreads();

  int loaded = -1;
  int slot = 0;
  for (; it.valid(); it.advance()) {
    const Stage stage = it.stage();
    const bool active = tile.map() < stage.maps;
    const int channel = it.channel(active ? tile.map() : 0);
    if (channel != loaded) {  // rare: see NchwPlan::blocks
      tile.load_filter(weight, bias, channel, flip);
      loaded = channel;
    }
    const int buffer = Layout::kFirst + slot * buffer_size;
    ring.wait();
    if (active) {
      tile.convolve(shared, Layout::kZeros, buffer + inputs.skew(stage.map, stage.in_row), stage);
    }
    __syncthreads();  // outputs overwrite the inputs

    const int skew = outputs.skew(stage.map, stage.out_row);
    if (active) {
      tile.store(shared + buffer + skew, stage);
    }
    ring.store(shared + buffer, skew, outputs.elements(stage.maps, stage.out_rows),
               [&] { return outputs.row(stage.map, stage.out_row); });
    slot = (slot + 1) % kStages;
    load(kPrefetchDistance, (slot + 1) % kStages);
  }
  ring.drain();
}

// Grid (range of channels or band, split of the images). Each tile accumulates over its images.
template <typename GradientTile>
__global__ void __launch_bounds__(kNchwThreads, GradientTile::Shape::kThreadsPerSm / kNchwThreads)
    nchw_weight_gradient_kernel(NchwParams params, int images,
                                const typename GradientTile::T* __restrict__ x,
                                const typename GradientTile::T* __restrict__ grad,
                                WeightReduction<typename GradientTile::T> reduction) {
  using T = typename GradientTile::T;
  using Layout = StageLayout<kPrefetchDistance, T>;
  extern __shared__ __align__(kGuardBytes) unsigned char memory[];
  RingBuffer<kPrefetchDistance> ring(memory);
  T* shared = Layout::clear(memory);
  const int buffer_size = (params.in_bytes + params.out_bytes) / sizeof(T);
  const int grad_offset = params.in_bytes / sizeof(T);
  GradientTile tile(params);
  const int band = blockIdx.x % params.bands;
  const int first_channel = blockIdx.x / params.bands * params.group;
  const int channels = min(params.group, params.channels - first_channel);
  const int maps = images * params.channels;
  const auto stage_of = [&](int n) {
    return Stage::at<typename GradientTile::Axis, GradientTile::Shape::kRows>(
        params, n * params.channels + first_channel, channels, band);
  };
  const FeatureMaps<const T> inputs(x, maps, params.in_h, params.in_w);
  const FeatureMaps<const T> outputs(grad, maps, params.out_h, params.out_w);
  const auto load = [&](int n, int slot) {
    if (ring.issues_loads()) {
      const Stage stage = stage_of(n);
      T* buffer = shared + Layout::kFirst + slot * buffer_size;
      ring.load(n < images, buffer, inputs.span(stage.map, stage.maps, stage.in_row, stage.in_rows),
                buffer + grad_offset,
                outputs.span(stage.map, stage.maps, stage.out_row, stage.out_rows));
    }
  };
  for (int i = 0; i < kPrefetchDistance; ++i) {
    load(blockIdx.y + i * gridDim.y, i);
  }
  __syncthreads();

  int slot = 0;
  for (int n = blockIdx.y; n < images; n += gridDim.y, slot ^= 1) {
    ring.wait();
    if (tile.map() < channels) {
      const Stage stage = stage_of(n);
      const int buffer = Layout::kFirst + slot * buffer_size;
      tile.add(shared, Layout::kZeros, buffer + inputs.skew(stage.map, stage.in_row),
               buffer + grad_offset + outputs.skew(stage.map, stage.out_row), stage);
    }
    __syncthreads();
    load(n + kPrefetchDistance * gridDim.y, slot);
  }
  trigger_dependent_launch();
  BlockSums<T> to(reduction, blockIdx.y * params.bands + band, first_channel);
  tile.reduce(reinterpret_cast<float*>(shared + Layout::kFirst), channels,
              [&](int i, float sum) { to.put(i, sum); });
}

template <typename Tile, typename T>
bool launch_nchw(const Convolution<T>& c) {
  const auto plan = plan_nchw<typename Tile::Axis, typename Tile::Shape>(
      c.g.n * c.g.c, c.g.c, c.in.h, c.in.w, c.out.h, c.out.w, c.padding_h, c.padding_w, 1,
      sizeof(T), false, StageLayout<kStages, T>::kBytes);
  if (plan) {
    c.launch(nchw_kernel<Tile>, plan->blocks(), plan->threads, plan->shared, plan->params, c.flip,
             c.in.data, c.weight, c.bias, c.out.data);
  }
  return plan.has_value();
}

template <typename GradientTile, typename T>
bool launch_nchw_weight_gradient(const WeightGradient<T>& c) {
  const DepthwiseGeometry& g = c.g;
  using Layout = StageLayout<kPrefetchDistance, T>;
  const auto plan = plan_nchw<typename GradientTile::Axis, typename GradientTile::Shape>(
      g.c, g.c, g.h, g.w, g.out_h, g.out_w, g.padding_h, g.padding_w, g.n, sizeof(T), true,
      Layout::kBytes);
  if (!plan) {
    return false;
  }
  const int64_t images = choose_splits(g.n, plan->stages, plan->resident_blocks, 2);
  reduce_weights(c, images * plan->params.bands, [&](const WeightReduction<T>& reduction) {
    launch_kernel(
        nchw_weight_gradient_kernel<GradientTile>, dim3(plan->stages, images), plan->threads,
        std::max(plan->shared,
                 Layout::kBytes + sizeof(float) * GradientTile::shared_floats(plan->threads)),
        c.stream, plan->params, static_cast<int>(g.n), c.x, c.grad, reduction);
  });
  return true;
}

}  // namespace ops::cuda
