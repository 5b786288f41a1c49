// CUDA batch normalisation and activation: one kernel for each stage (formulas.h), or (NCHW) one
// for all if the inputs of a channel are small and a block for each channel occupies the device.
//
//   rows (pixels)   columns (vectors of channels)
//   ┌──────────┬──────────┐  chunk 0     reduce   two sums of each channel and chunk
//   │ block    │ block    │                │  partials [chunks, C]
//   ├──────────┼──────────┤  chunk 1     finish   statistics, or gradients of weight and bias
//   │          │          │                │  [C] (core/cuda/reduce.cuh)
//   └──────────┴──────────┘              map      output, or gradient of the input; last chunk
//                                                 first, because the cache holds it
//
//   block:   `columns` vectors of channels (NCHW: one channel) × a chunk of rows
//   shared:  two sums of half of the threads
//   thread:  one column, every `thread_rows`-th row; kUnroll vectors in flight
#pragma once

#include "batch_norm_act2d/cuda/grid.cuh"
#include "core/cuda/reduce.cuh"

namespace ops::batch_norm_act2d {

// Compute the sums of each channel over the chunk of the block; call store(channel, sums).
template <typename A, typename G, typename Stage, typename Store, typename... In>
__device__ void reduce_slice(const Slice<G>& slice, const Stage& stage, const Store& store,
                             const In*... in) {
  constexpr int kChannels = G::kChannels;
  __shared__ A shared[kChannels * G::kThreads];
  A arguments[kChannels][Stage::kArguments], sums[2][kChannels]{};
  if (slice.inside()) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      stage.load(slice.channel + c, arguments[c]);
    }
    const auto add = [&](auto count, const int64_t*, const auto&... inputs) {
#pragma unroll
      for (int i = 0; i < count.value; ++i) {
#pragma unroll
        for (int v = 0; v < G::V; ++v) {
          const int c = v % kChannels;
          stage.add(arguments[c], sums[0][c], sums[1][c],
                    static_cast<A>(inputs.vector[i].lane[v])...);
        }
      }
    };
    slice.for_each(add, in...);
  }
  reduce_block(sums, shared, slice.column, slice.g.columns, slice.thread_row, slice.g.thread_rows);
  if (slice.thread_row == 0 && slice.inside()) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      store(slice.channel + c, Sums<A>{sums[0][c], sums[1][c]});
    }
  }
}

template <typename A, typename G, typename Stage, typename... In>
__global__ void __launch_bounds__(G::kThreads, G::kBlocks)
    reduce_kernel(G g, Stage stage, Sums<A>* __restrict__ partials, const In*... in) {
  const auto store = [&](int64_t channel, const Sums<A>& sums) {
    partials[blockIdx.y * g.channels + channel] = sums;
  };
  reduce_slice<A>(Slice<G>(g, false), stage, store, in...);
}

template <typename T, typename G, typename Stage, typename... In>
__device__ void map_slice(const Slice<G>& slice, const Stage& stage, T* __restrict__ out,
                          const In*... in) {
  using A = acc_t<T>;
  if (!slice.inside()) {
    return;
  }
  A arguments[G::kChannels][Stage::kArguments];
#pragma unroll
  for (int c = 0; c < G::kChannels; ++c) {
    stage.load(slice.channel + c, arguments[c]);
  }
  const auto map = [&](auto count, const int64_t* offsets, const auto&... inputs) {
#pragma unroll
    for (int i = 0; i < count.value; ++i) {
      A y[G::V];
#pragma unroll
      for (int v = 0; v < G::V; ++v) {
        y[v] = stage(arguments[v % G::kChannels], static_cast<A>(inputs.vector[i].lane[v])...);
      }
      store_vector(out + offsets[i], y);
    }
  };
  slice.for_each(map, in...);
}

template <typename G, typename T, typename Stage, typename... In>
__global__ void __launch_bounds__(G::kThreads, G::kBlocks)
    map_kernel(G g, Stage stage, T* __restrict__ out, const In*... in) {
  wait_for_previous_kernel();
  map_slice(Slice<G>(g, true), stage, out, in...);
}

// All stages for channels of one chunk. `out` may be null.
template <typename G, typename T, typename Reduce, typename Map, typename... In>
__global__ void __launch_bounds__(G::kThreads, G::kBlocks)
    channel_kernel(G g, Reduce reduce, Map map, T* out, const In*... in) {
  using A = acc_t<T>;
  const Slice<G> slice(g, false);
  const auto finish = [&](int64_t channel, const Sums<A>& sums) {
    reduce(channel, {sums.first, sums.second});
  };
  reduce_slice<A>(slice, reduce, finish, in...);
  if (out != nullptr) {
    __syncthreads();
    map_slice(slice, map, out, in...);
  }
}

}  // namespace ops::batch_norm_act2d
