// Kernels of nchw_fma and nchw_mma, templated on the tile that computes a stage, and their
// launches. Figures: nchw_fma.cu, mma_tile.cuh, nchw_mma.cu.
#pragma once

#include "depthwise_conv2d/cuda/planes/nchw_stage.cuh"
#include "depthwise_conv2d/cuda/weight_reduction.cuh"

namespace ops::depthwise_conv2d {

// Compute stages first, first + stride … < end. load(i, buffer) starts to load stage i, or nothing
// if i ≥ end; compute(i, buffer) calls ring.wait() before it reads its buffer. Offsets of buffers
// are in elements. Return after the last use of shared memory.
template <typename T, int kBuffers, typename Load, typename Compute>
__device__ __forceinline__ void for_each_stage(RingBuffer<kBuffers>& ring, T* shared,
                                               int buffer_bytes, int first, int end, int stride,
                                               const Load& load, const Compute& compute) {
  const auto buffer = [&](int slot) {
    return static_cast<int>((kBuffersOffset + slot * buffer_bytes) / sizeof(T));
  };
  for (int i = threadIdx.x; i < kGuardBytes / sizeof(T); i += blockDim.x) {
    shared[kZerosOffset / sizeof(T) + i] = T(0);
  }
  if (ring.issues_loads()) {
    for (int i = 0; i < kPrefetchDistance; ++i) {
      load(first + i * stride, buffer(i));
    }
  }
  __syncthreads();
  int slot = 0;
  for (int i = first; i < end; i += stride) {
    compute(i, buffer(slot));
    if (ring.issues_loads()) {
      load(i + kPrefetchDistance * stride, buffer((slot + kPrefetchDistance) % kBuffers));
    }
    slot = (slot + 1) % kBuffers;
  }
}

template <typename Tile, typename T>
__global__ void __launch_bounds__(kNchwThreads, Tile::kThreadsPerSm / kNchwThreads)
    nchw_kernel(NchwParams params, const T* __restrict__ in, const T* __restrict__ weight,
                const T* __restrict__ bias, T* __restrict__ out) {
  extern __shared__ __align__(kGuardBytes) unsigned char memory[];
  RingBuffer<kStages> ring(memory);
  T* shared = reinterpret_cast<T*>(memory);
  Tile tile(params);
  const int maps = params.images * params.channels;
  const FeatureMaps<const T> inputs{in, maps, params.in_h, params.in_w};
  const FeatureMaps<T> outputs{out, maps, params.out_h, params.out_w};
  const auto stage_at = [&](int i) {
    const int group = params.by_bands(i), map = group * params.group;
    return Stage::at<typename Tile::Axis, Tile::kRows>(params, map, min(params.group, maps - map),
                                                       i - group * params.bands);
  };
  int loaded = -1;
  for_each_stage(
      ring, shared, max(params.in_bytes, params.out_bytes), blockIdx.x, params.stages, gridDim.x,
      [&](int i, int buffer) {
        const Stage stage = stage_at(i);
        ring.load(i < params.stages, shared + buffer,
                  inputs.span(stage.map, stage.maps, stage.in_row, stage.in_rows));
      },
      [&](int i, int buffer) {
        const Stage stage = stage_at(i);
        const bool active = tile.map() < stage.maps;
        const int map = stage.map + (active ? tile.map() : 0);
        const int channel = map - params.by_channels(map) * params.channels;
        if (channel != loaded) {  // rare: see launch_nchw
          tile.load_filter(weight, bias, channel);
          loaded = channel;
        }
        ring.wait();
        if (active) {
          tile.convolve(shared, buffer + inputs.skew(stage.map, stage.in_row), stage);
        }
        __syncthreads();  // outputs overwrite the inputs
        const int skew = outputs.skew(stage.map, stage.out_row);
        if (active) {
          tile.store(shared + buffer + skew, stage, in);
        }
        ring.store(shared + buffer, skew, stage.maps * stage.out_rows * params.out_w, [&] {
          return outputs.span(stage.map, stage.maps, stage.out_row, stage.out_rows).first;
        });
      });
  ring.drain();
}

// Grid (range of channels or band, split of the images). Each tile accumulates over its images.
template <typename Tile, typename T>
__global__ void __launch_bounds__(kNchwThreads, Tile::kThreadsPerSm / kNchwThreads)
    nchw_weight_gradient_kernel(NchwParams params, const T* __restrict__ x,
                                const T* __restrict__ grad, WeightReduction<T> reduction) {
  extern __shared__ __align__(kGuardBytes) unsigned char memory[];
  RingBuffer<kPrefetchDistance> ring(memory);
  T* shared = reinterpret_cast<T*>(memory);
  Tile tile(params);
  const int band = blockIdx.x % params.bands;
  const int first_channel = blockIdx.x / params.bands * params.group;
  const int channels = min(params.group, params.channels - first_channel);
  const int maps = params.images * params.channels;
  const FeatureMaps<const T> inputs{x, maps, params.in_h, params.in_w};
  const FeatureMaps<const T> grads{grad, maps, params.out_h, params.out_w};
  const int grad_offset = params.in_bytes / sizeof(T);
  const auto stage_at = [&](int n) {
    return Stage::at<typename Tile::Axis, Tile::kRows>(params, n * params.channels + first_channel,
                                                       channels, band);
  };
  for_each_stage(
      ring, shared, params.in_bytes + params.out_bytes, blockIdx.y, params.images, gridDim.y,
      [&](int n, int buffer) {
        const Stage stage = stage_at(n);
        ring.load(n < params.images, shared + buffer,
                  inputs.span(stage.map, stage.maps, stage.in_row, stage.in_rows),
                  shared + buffer + grad_offset,
                  grads.span(stage.map, stage.maps, stage.out_row, stage.out_rows));
      },
      [&](int n, int buffer) {
        ring.wait();
        if (tile.map() < channels) {
          const Stage stage = stage_at(n);
          tile.add(shared, buffer + inputs.skew(stage.map, stage.in_row),
                   buffer + grad_offset + grads.skew(stage.map, stage.out_row), stage);
        }
        __syncthreads();
      });
  trigger_dependent_launch();
  float* sums = reinterpret_cast<float*>(memory + kBuffersOffset);
  tile.store_sums(sums);
  __syncthreads();
  // A warp-shuffle reduction of each sum over kReduceLanes lanes.
  constexpr int kReduceLanes = Tile::kReduceLanes;
  const int count = channels * (Tile::kTaps + 1), lane = threadIdx.x % kReduceLanes;
#pragma unroll 4
  for (int first = 0; first < count; first += blockDim.x / kReduceLanes) {
    const int i = first + threadIdx.x / kReduceLanes;
    float total = i < count ? tile.partial_sum(sums, i, lane) : 0.0f;
#pragma unroll
    for (int lanes = kReduceLanes / 2; lanes > 0; lanes /= 2) {
      total += __shfl_down_sync(~0u, total, lanes, kReduceLanes);
    }
    if (lane == 0 && i < count) {
      reduction.put(blockIdx.y * params.bands + band, first_channel, i, total);
    }
  }
}

template <typename Tile, typename T>
bool launch_nchw(const Convolution<T>& c) {
  const auto plan = plan_nchw<Tile>(c.g, false, c.in, c.out, c.padding_h, c.padding_w);
  if (!plan) {
    return false;
  }
  // Preferably a multiple of the channels' period: each block then keeps its channels, and reloads
  // no filter.
  NchwParams params = plan->params;
  params.flip = c.flip;
  const int resident = plan->resident_blocks;
  const int period = params.channels / params.group * params.bands;
  const bool periodic = params.channels % params.group == 0 && period <= resident;
  const int blocks = std::min(params.stages, periodic ? resident / period * period : resident);
  c.launch(nchw_kernel<Tile, T>, blocks, plan->threads, plan->shared, params, c.in.data, c.weight,
           c.bias, c.out.data);
  return true;
}

template <typename Tile, typename T>
bool launch_nchw(const WeightGradient<T>& c) {
  const Geometry& g = c.g;
  const auto plan =
      plan_nchw<Tile>(g, true, Image<const T>{c.x, g.h, g.w},
                      Image<const T>{c.grad, g.out_h, g.out_w}, g.padding_h, g.padding_w);
  if (!plan) {
    return false;
  }
  const NchwParams& params = plan->params;
  const int64_t splits = choose_splits(g.n, params.stages, plan->resident_blocks, 2);
  const size_t reduction_bytes =
      kBuffersOffset + sizeof(float) * Tile::shared_floats(plan->threads);
  reduce_weights(c, splits * params.bands, [&](const WeightReduction<T>& reduction) {
    launch_kernel(nchw_weight_gradient_kernel<Tile, T>, dim3(params.stages, splits), plan->threads,
                  std::max(plan->shared, reduction_bytes), c.stream, params, c.x, c.grad,
                  reduction);
  });
  return true;
}

}  // namespace ops::depthwise_conv2d
