// CUDA batch normalisation and activation: one kernel for each stage (formulas.h), or (NCHW) one
// for all if the inputs of a channel are small and a block for each channel occupies the device.
//
//   rows (pixels)   columns (vectors of channels)
//   ┌──────────┬──────────┐  chunk 0     reduce   two sums of each channel and chunk
//   │ block    │ block    │                │  partials [2, chunks, C]
//   ├──────────┼──────────┤  chunk 1     finish   statistics, or gradients of weight and bias
//   │          │          │                │  [C]
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

// Vectors of an input, which no kernel writes: GCC does not take packs of __restrict__ pointers.
template <typename T, int V, int N>
struct Vectors {
  Vector<T, V> vector[N];

  __device__ Vectors(const T* x, const int64_t* offsets) {
    using Bits = typename BitsOf<V * sizeof(T)>::type;  // see load_vector
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Bits bits = __ldg(reinterpret_cast<const Bits*>(x + offsets[i]));
      vector[i] = reinterpret_cast<const Vector<T, V>&>(bits);
    }
  }
};

// Compute both sums of each channel over the chunk of the block; call store(channel, first,
// second). `x` is the first input, the others are `in`.
template <typename T, typename G, typename Stage, typename Store, typename... In>
__device__ void reduce_slice(const Slice<G>& slice, const Stage& stage, const Store& store,
                             const T* __restrict__ x, const In*... in) {
  using A = acc_t<T>;
  constexpr int kChannels = G::kChannels;
  __shared__ A shared[kChannels * G::kThreads];
  A arguments[kChannels][Stage::kArguments], sums[2][kChannels]{};
  if (slice.inside()) {
    const int64_t middle = (slice.first + slice.last) / 2,
                  rows[] = {slice.first, middle, slice.last - 1};
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      A sample[3]{};
      if constexpr (Stage::kSampled) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          sample[i] = static_cast<A>(x[slice.offset(rows[i]) + c]);
        }
      }
      stage.load(slice.channel + c, sample, arguments[c]);
    }
    slice.for_each([&](auto count, const int64_t* offsets) {
      const auto add = [&](const auto&... inputs) {
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
      add(Vectors<T, G::V, count.value>(x, offsets),
          Vectors<In, G::V, count.value>(in, offsets)...);
    });
  }
  reduce_block(sums, shared, slice.column, slice.g.columns, slice.thread_row, slice.g.thread_rows);
  if (slice.thread_row == 0 && slice.inside()) {
    const A n = static_cast<A>((slice.last - slice.first) * (G::V / kChannels));
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      stage.finish_chunk(arguments[c], sums[0][c], sums[1][c], n);
      store(slice.channel + c, sums[0][c], sums[1][c]);
    }
  }
}

template <typename G, typename T, typename Stage, typename... In>
__global__ void __launch_bounds__(G::kThreads, G::kBlocks)
    reduce_kernel(G g, Stage stage, acc_t<T>* __restrict__ partials, const T* __restrict__ x,
                  const In*... in) {
  using A = acc_t<T>;
  const auto store = [&](int64_t channel, A first, A second) {
    A* to = partials + blockIdx.y * g.channels + channel;
    to[0] = first;
    to[g.chunks * g.channels] = second;
  };
  reduce_slice<T>(Slice<G>(g, false), stage, store, x, in...);
}

constexpr int kFinishChannels = 32, kFinishLines = 32;

// Combine chunks of `chunk` elements, `count` in all; each line of threads adds every 32nd.
template <typename Stage, typename A>
__global__ void __launch_bounds__(kFinishChannels* kFinishLines)
    finish_kernel(Stage stage, const A* __restrict__ partials, int64_t chunks, int64_t channels,
                  int64_t chunk, int64_t count) {
  __shared__ Sums shared[kFinishLines][kFinishChannels];
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kFinishChannels + threadIdx.x;
  const bool inside = channel < channels;
  wait_for_previous_kernel();
  const double origin = inside ? finite_or_zero(partials[channel]) : A(0);
  Sums sums{};
  if (inside) {
#pragma unroll 4
    for (int64_t i = threadIdx.y; i < chunks; i += kFinishLines) {
      const int64_t n = i == chunks - 1 ? count - i * chunk : chunk;
      stage.combine(sums, static_cast<double>(n), partials[i * channels + channel],
                    partials[(chunks + i) * channels + channel], origin);
    }
  }
  shared[threadIdx.y][threadIdx.x] = sums;
  __syncthreads();
  if (threadIdx.y == 0 && inside) {
    for (int line = 1; line < kFinishLines; ++line) {
      sums += shared[line][threadIdx.x];
    }
    stage.store(channel, sums, origin);
  }
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
  slice.for_each([&](auto count, const int64_t* offsets) {
    const auto store = [&](const auto&... inputs) {
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
    store(Vectors<In, G::V, count.value>(in, offsets)...);
  });
}

template <typename G, typename T, typename Stage, typename... In>
__global__ void __launch_bounds__(G::kThreads, G::kBlocks)
    map_kernel(G g, Stage stage, T* __restrict__ out, const In*... in) {
  wait_for_previous_kernel();
  map_slice<T>(Slice<G>(g, true), stage, out, in...);
}

// All stages for channels of one chunk. `out` may be null.
template <typename G, typename T, typename Reduce, typename Map, typename... In>
__global__ void __launch_bounds__(G::kThreads, G::kBlocks)
    channel_kernel(G g, Reduce reduce, Map map, int64_t count, T* out, const T* __restrict__ x,
                   const In*... in) {
  using A = acc_t<T>;
  const Slice<G> slice(g, false);
  const auto store = [&](int64_t channel, A first, A second) {
    const double origin = finite_or_zero(first);
    Sums sums{};
    reduce.combine(sums, static_cast<double>(count), first, second, origin);
    reduce.store(channel, sums, origin);
  };
  reduce_slice<T>(slice, reduce, store, x, in...);
  if (out != nullptr) {
    __syncthreads();
    map_slice<T>(slice, map, out, x, in...);
  }
}

}  // namespace ops::batch_norm_act2d
