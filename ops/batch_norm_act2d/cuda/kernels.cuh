// CUDA batch normalisation and activation: kernels. Fused kernels (channel_…): NCHW, channels that
// fit in shared memory; a block owns a channel and reads it once. Otherwise three kernels:
//
//   rows (pixels)   columns (vectors of channels)
//   ┌──────────┬──────────┐  chunk 0     chunk_…   two sums of each channel and chunk
//   │ block    │ block    │                 │  partials [2, chunks, C]
//   ├──────────┼──────────┤  chunk 1     finish_…  statistics, or gradients of weight and bias
//   │          │          │                 │  [C]
//   └──────────┴──────────┘              apply_…   output, or gradient of the input; last chunk
//                                                  first, because the cache holds it
//
//   block:   `columns` vectors of channels (NCHW: one channel) × a chunk of rows
//   shared:  two sums of each thread and channel; fused kernels: also the channel
//   thread:  one column, every `thread_rows`-th row; kUnroll vectors in flight
#pragma once

#include "batch_norm_act2d/cuda/grid.cuh"

namespace ops::cuda {

// Add the sums of all thread rows of a block; call store(c, a, b) with those of channel c of a
// column.
template <typename G, typename A, typename F>
__device__ void add_thread_rows(const Slice<G>& slice, const A (&a)[G::kChannels],
                                const A (&b)[G::kChannels], const F& store) {
  __shared__ A sums[2][G::kChannels][kThreads];
#pragma unroll
  for (int c = 0; c < G::kChannels; ++c) {
    sums[0][c][threadIdx.x] = a[c];
    sums[1][c][threadIdx.x] = b[c];
  }
  for (int rows = slice.g.thread_rows; rows > 1;) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (slice.thread_row + half < rows) {
#pragma unroll
      for (int c = 0; c < G::kChannels; ++c) {
        sums[0][c][threadIdx.x] += sums[0][c][threadIdx.x + half * slice.g.columns];
        sums[1][c][threadIdx.x] += sums[1][c][threadIdx.x + half * slice.g.columns];
      }
    }
    rows = half;
  }
  if (slice.thread_row == 0 && slice.inside()) {
#pragma unroll
    for (int c = 0; c < G::kChannels; ++c) {
      store(c, sums[0][c][threadIdx.x], sums[1][c][threadIdx.x]);
    }
  }
}

// Origins of the sums of each channel of a slice, in kDeviationUnit: medians of its first, middle
// and last element.
template <typename G, typename A>
struct Origins {
  A value[G::kChannels];

  template <typename T>
  __device__ Origins(const Slice<G>& slice, const T* x) {
    if (slice.inside()) {
      const T *first = x + slice.offset(slice.first), *last = x + slice.offset(slice.last - 1),
              *middle = x + slice.offset((slice.first + slice.last) / 2);
#pragma unroll
      for (int c = 0; c < G::kChannels; ++c) {
        value[c] = finite_or_zero(median<A>(first[c], middle[c], last[c])) * A(kDeviationUnit);
      }
    }
  }
};

// Compute mean and Σ (x − mean)² of each channel of a slice; call store(channel, mean, squares).
template <typename T, typename G, typename Source, typename Store, typename A>
__device__ void reduce_statistics(const Slice<G>& slice, Source source,
                                  const Origins<G, A>& origins, const Store& store) {
  A sum[G::kChannels]{}, square[G::kChannels]{};
  if (slice.inside()) {
    slice.for_each([&](auto count, const int64_t* offsets) {
      Vector<T, G::V> vectors[count.value];
      source.load(offsets, vectors);
#pragma unroll
      for (int i = 0; i < count.value; ++i) {
#pragma unroll
        for (int v = 0; v < G::V; ++v) {
          const int c = v % G::kChannels;
          const A d = static_cast<A>(vectors[i].lane[v]) * A(kDeviationUnit) - origins.value[c];
          sum[c] += d * A(kSumUnit);
          square[c] += d * d;
        }
      }
    });
  }
  const A n = static_cast<A>((slice.last - slice.first) * (G::V / G::kChannels));
  add_thread_rows(slice, sum, square, [&](int c, A s, A q) {
    const Moments<A> moments(origins.value[c], s, q, n);
    store(slice.channel + c, moments.mean, moments.squares);
  });
}

template <typename G, typename T, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, G::kAlongChannels ? kBlocks : kBlocks + 1)
    chunk_statistics(G g, const T* __restrict__ x, A* __restrict__ partials) {
  const Slice<G> slice(g, false);
  const Origins<G, A> origins(slice, x);
  reduce_statistics<T>(slice, Global<T>{x}, origins, [&](int64_t channel, A mean, A squares) {
    A* to = partials + blockIdx.y * g.channels + channel;
    to[0] = mean;
    to[g.chunks * g.channels] = squares;
  });
}

constexpr int kFinishChannels = 32, kFinishLines = 32;

// Add up f(chunk, sums) over all chunks; the threads of line 0 get the sums.
template <int N, typename F>
__device__ void add_chunks(int64_t chunks, bool inside, double (&sums)[N], const F& f) {
  __shared__ double shared[N][kFinishLines][kFinishChannels];
  if (inside) {
#pragma unroll 4
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kFinishLines) {
      f(chunk, sums);
    }
  }
  for (int k = 0; k < N; ++k) {
    shared[k][threadIdx.y][threadIdx.x] = sums[k];
  }
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int k = 0; k < N; ++k) {
      for (int line = 1; line < kFinishLines; ++line) {
        sums[k] += shared[k][line][threadIdx.x];
      }
    }
  }
}

// Statistics of each channel from those of its chunks of `chunk` elements (Chan, Golub, LeVeque).
template <typename A>
__global__ void __launch_bounds__(kFinishChannels* kFinishLines)
    finish_statistics(const A* __restrict__ partials, int64_t chunks, int64_t channels,
                      int64_t chunk, Statistics<A> statistics) {
  wait_for_previous_kernel();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kFinishChannels + threadIdx.x;
  const bool inside = channel < channels;
  const double origin = inside ? finite_or_zero(partials[channel]) : A(0);
  const double n = static_cast<double>(statistics.n);
  const double last = n - static_cast<double>((chunks - 1) * chunk);  // elements of the last chunk
  double sums[3]{};
  add_chunks(chunks, inside, sums, [&](int64_t i, double (&sums)[3]) {
    const double m = i == chunks - 1 ? last : static_cast<double>(chunk);
    const double d = partials[i * channels + channel] - origin;
    sums[0] += m * d;
    sums[1] += m * d * d;
    sums[2] += partials[(chunks + i) * channels + channel];
  });
  if (threadIdx.y == 0 && inside) {
    const double shift = sums[0] / n;
    statistics.store(channel, origin + shift, sums[2] + central_squares(sums[0], shift, sums[1]));
  }
}

// Coefficients of the channels of a vector: z = (x − mean) scale + bias.
template <typename G, typename A>
struct Affine {
  A mean[G::kChannels], scale[G::kChannels], bias[G::kChannels]{};

  __device__ Affine(const Channels<A>& from, int64_t channel) {
#pragma unroll
    for (int c = 0; c < G::kChannels; ++c) {
      mean[c] = from.mean[channel + c];
      scale[c] = from.rstd[channel + c];
    }
    if (from.weight) {
#pragma unroll
      for (int c = 0; c < G::kChannels; ++c) {
        scale[c] *= from.weight[channel + c];
      }
    }
    if (from.bias) {
#pragma unroll
      for (int c = 0; c < G::kChannels; ++c) {
        bias[c] = from.bias[channel + c];
      }
    }
  }
};

// Normalise a slice, apply the activation f and store to `out`.
template <typename T, typename G, typename Source, typename F, typename A>
__device__ void apply_normalisation(const Slice<G>& slice, Source source,
                                    const Channels<A>& channels, const F& f, T* out) {
  if (!slice.inside()) {
    return;
  }
  const Affine<G, A> affine(channels, slice.channel);
  slice.for_each([&](auto count, const int64_t* offsets) {
    Vector<T, G::V> vectors[count.value];
    source.load(offsets, vectors);
#pragma unroll
    for (int i = 0; i < count.value; ++i) {
#pragma unroll
      for (int v = 0; v < G::V; ++v) {
        const int c = v % G::kChannels;
        const A d = static_cast<A>(vectors[i].lane[v]) - affine.mean[c];
        vectors[i].lane[v] = static_cast<T>(f.value(d * affine.scale[c] + affine.bias[c]));
      }
      store_vector(out + offsets[i], vectors[i]);
    }
  });
}

template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_forward(G g, const T* __restrict__ x, Channels<A> channels, F f, T* __restrict__ out) {
  wait_for_previous_kernel();
  apply_normalisation(Slice<G>(g, true), Global<T>{x}, channels, f, out);
}

// The forward pass of a channel that fits in shared memory.
template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads)
    channel_forward(G g, const T* __restrict__ x, Statistics<A> statistics, Channels<A> channels,
                    F f, T* __restrict__ out) {
  extern __shared__ __align__(kVectorBytes) char memory[];
  using Source = Shared<T, G::V>;
  const auto copy = reinterpret_cast<Vector<T, G::V>*>(memory);
  const Slice<G> slice(g, false);
  const Origins<G, A> origins(slice, x);  // first: loads do not pass the copies
  Source::copy(slice, x, copy);
  commit_copies();
  wait_for_copies<0>();
  const Source source{copy + threadIdx.x};
  reduce_statistics<T>(slice, source, origins, [&](int64_t channel, A mean, A squares) {
    statistics.store(channel, mean, squares);
  });
  __syncthreads();
  apply_normalisation(slice, source, channels, f, out);
}

// For each element of a slice, call use(element, c, g, x − mean): its channel c in the vector, its
// gradient g before the activation. `element`, the given gradient, may be overwritten; then call
// store(offset, vector) with the vector.
template <typename T, typename G, typename Source, typename F, typename A, typename Use,
          typename Store>
__device__ void for_each_gradient(const Slice<G>& slice, Source grad, Source x,
                                  const Affine<G, A>& affine, const F& f, const Use& use,
                                  const Store& store) {
  slice.for_each([&](auto count, const int64_t* offsets) {
    Vector<T, G::V> grads[count.value], inputs[count.value];
    grad.load(offsets, grads);
    x.load(offsets, inputs);
#pragma unroll
    for (int i = 0; i < count.value; ++i) {
#pragma unroll
      for (int v = 0; v < G::V; ++v) {
        const int c = v % G::kChannels;
        const A d = static_cast<A>(inputs[i].lane[v]) - affine.mean[c];
        const A z = d * affine.scale[c] + affine.bias[c];
        use(grads[i].lane[v], c, f.gradient(static_cast<A>(grads[i].lane[v]), z), d);
      }
      store(offsets[i], grads[i]);
    }
  });
}

// Compute the sums of each channel of a slice; call store(channel, Σ g, Σ g (x − mean)).
// g: gradient with respect to the activation's input.
template <typename T, typename G, typename Source, typename F, typename A, typename Store>
__device__ void reduce_gradients(const Slice<G>& slice, Source grad, Source x,
                                 const Channels<A>& channels, const F& f, const Store& store) {
  A sum[G::kChannels]{}, product[G::kChannels]{};
  if (slice.inside()) {
    const Affine<G, A> affine(channels, slice.channel);
    for_each_gradient<T>(
        slice, grad, x, affine, f,
        [&](T&, int c, A value, A d) {
          sum[c] += value;
          product[c] += value * d;
        },
        [](int64_t, const Vector<T, G::V>&) {});
  }
  add_thread_rows(slice, sum, product, [&](int c, A s, A p) { store(slice.channel + c, s, p); });
}

template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    chunk_gradients(G g, const T* __restrict__ grad, const T* __restrict__ x, Channels<A> channels,
                    F f, A* __restrict__ partials) {
  const Slice<G> slice(g, false);
  reduce_gradients<T>(slice, Global<T>{grad}, Global<T>{x}, channels, f,
                      [&](int64_t channel, A s, A p) {
                        A* to = partials + blockIdx.y * g.channels + channel;
                        to[0] = s;
                        to[g.chunks * g.channels] = p;
                      });
}

// Gradients of weight and bias.
template <typename A>
__global__ void __launch_bounds__(kFinishChannels* kFinishLines)
    finish_gradients(const A* __restrict__ partials, int64_t chunks, int64_t channels,
                     const A* __restrict__ rstd, A* __restrict__ grad_weight,
                     A* __restrict__ grad_bias) {
  wait_for_previous_kernel();
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kFinishChannels + threadIdx.x;
  const bool inside = channel < channels;
  double sums[2]{};
  add_chunks(chunks, inside, sums, [&](int64_t i, double (&sums)[2]) {
    sums[0] += partials[i * channels + channel];
    sums[1] += partials[(chunks + i) * channels + channel];
  });
  if (threadIdx.y == 0 && inside) {
    grad_bias[channel] = static_cast<A>(sums[0]);
    grad_weight[channel] = weight_gradient(sums[0], sums[1], rstd[channel]);
  }
}

// Store the gradient of the input: scale (g − Σ g / n − x̂ Σ g x̂ / n), x̂ = (x − mean) rstd.
template <typename T, typename G, typename Source, typename F, typename A>
__device__ void apply_input_gradient(const Slice<G>& slice, Source grad, Source x,
                                     const Channels<A>& channels, const F& f, const A* grad_weight,
                                     const A* grad_bias, A count_inverse, T* out) {
  if (!slice.inside()) {
    return;
  }
  const Affine<G, A> affine(channels, slice.channel);
  A offset[G::kChannels], slope[G::kChannels];
#pragma unroll
  for (int c = 0; c < G::kChannels; ++c) {
    const int64_t channel = slice.channel + c;
    const A factor = affine.scale[c] * count_inverse;
    offset[c] = factor * grad_bias[channel];
    slope[c] = factor * (grad_weight[channel] * channels.rstd[channel]);
  }
  for_each_gradient<T>(
      slice, grad, x, affine, f,
      [&](T& element, int c, A value, A d) {
        element = static_cast<T>(affine.scale[c] * value - offset[c] - d * slope[c]);
      },
      [&](int64_t at, const Vector<T, G::V>& result) { store_vector(out + at, result); });
}

template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_backward(G g, const T* __restrict__ grad, const T* __restrict__ x, Channels<A> channels,
                   F f, const A* __restrict__ grad_weight, const A* __restrict__ grad_bias,
                   A count_inverse, T* __restrict__ out) {
  wait_for_previous_kernel();
  apply_input_gradient(Slice<G>(g, true), Global<T>{grad}, Global<T>{x}, channels, f, grad_weight,
                       grad_bias, count_inverse, out);
}

// The backward pass of a channel that fits in shared memory with its gradient. `out` may be null.
template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads)
    channel_backward(G g, const T* __restrict__ grad, const T* __restrict__ x, Channels<A> channels,
                     F f, A* grad_weight, A* grad_bias, A count_inverse, T* __restrict__ out) {
  extern __shared__ __align__(kVectorBytes) char memory[];
  using Source = Shared<T, G::V>;
  const auto copy = reinterpret_cast<Vector<T, G::V>*>(memory);
  const Slice<G> slice(g, false);
  Source::copy(slice, grad, copy);
  Source::copy(slice, x, copy + g.rows);
  commit_copies();
  wait_for_copies<0>();
  const Source grads{copy + threadIdx.x}, inputs{grads.next + g.rows};
  reduce_gradients<T>(slice, grads, inputs, channels, f, [&](int64_t channel, A s, A p) {
    grad_bias[channel] = s;
    grad_weight[channel] = weight_gradient(s, p, channels.rstd[channel]);
  });
  if (out != nullptr) {
    __syncthreads();
    apply_input_gradient(slice, grads, inputs, channels, f, grad_weight, grad_bias, count_inverse,
                         out);
  }
}

}  // namespace ops::cuda
