// CUDA batch normalisation and activation: kernels.
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
//   shared:  two sums of each thread and channel
//   thread:  one column, every `lines`-th row; kUnroll vectors in flight
#pragma once

#include "batch_norm_act2d/cuda/grid.cuh"

namespace ops::cuda {

// Load vectors of x into `vectors`.
template <int N, int V, typename T>
__device__ void load_all(const T* x, const int64_t* offsets, Vector<T, V> (&vectors)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    vectors[i] = load_vector<V>(x + offsets[i]);
  }
}

// Add the sums of all lines of a block; call store(c, a, b) with those of channel c of a column.
template <typename G, typename A, typename F>
__device__ void add_lines(const Slice<G>& slice, const A (&a)[G::kChannels],
                          const A (&b)[G::kChannels], const F& store) {
  __shared__ A sums[2][G::kChannels][kThreads];
#pragma unroll
  for (int c = 0; c < G::kChannels; ++c) {
    sums[0][c][threadIdx.x] = a[c];
    sums[1][c][threadIdx.x] = b[c];
  }
  for (int lines = slice.g.lines; lines > 1;) {
    const int half = (lines + 1) / 2;
    __syncthreads();
    if (slice.line + half < lines) {
#pragma unroll
      for (int c = 0; c < G::kChannels; ++c) {
        sums[0][c][threadIdx.x] += sums[0][c][threadIdx.x + half * slice.g.columns];
        sums[1][c][threadIdx.x] += sums[1][c][threadIdx.x + half * slice.g.columns];
      }
    }
    lines = half;
  }
  if (slice.line == 0 && slice.inside()) {
#pragma unroll
    for (int c = 0; c < G::kChannels; ++c) {
      store(c, sums[0][c][threadIdx.x], sums[1][c][threadIdx.x]);
    }
  }
}

// Mean and Σ (x − mean)² of each channel and chunk. The sums are of x − x₀, with the chunk's first
// element x₀, for precision where the mean is large.
template <typename G, typename T, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    chunk_statistics(G g, const T* __restrict__ x, A* __restrict__ partials) {
  const Slice<G> slice(g, false);
  A origin[G::kChannels], sum[G::kChannels]{}, square[G::kChannels]{};
  if (slice.inside()) {
    const T* from = x + slice.offset(slice.first);
#pragma unroll
    for (int c = 0; c < G::kChannels; ++c) {
      origin[c] = static_cast<A>(from[c]);
    }
    slice.for_each([&](auto count, const int64_t* offsets) {
      Vector<T, G::V> vectors[count.value];
      load_all(x, offsets, vectors);
#pragma unroll
      for (int i = 0; i < count.value; ++i) {
#pragma unroll
        for (int v = 0; v < G::V; ++v) {
          const int c = v % G::kChannels;
          const A d = static_cast<A>(vectors[i].lane[v]) - origin[c];
          sum[c] += d;
          square[c] += d * d;
        }
      }
    });
  }
  const A n = static_cast<A>((slice.last - slice.first) * (G::V / G::kChannels));
  add_lines(slice, sum, square, [&](int c, A s, A q) {
    A* to = partials + blockIdx.y * g.channels + slice.channel + c;
    *to = origin[c] + s / n;
    to[g.chunks * g.channels] = max(q - s * (s / n), A(0));
  });
}

constexpr int kFinishChannels = 32, kFinishLines = 32;

// Add up f(chunk, sums) over all chunks; the threads of line 0 get the sums.
template <typename F>
__device__ void add_chunks(int64_t chunks, bool inside, double (&sums)[3], const F& f) {
  __shared__ double shared[3][kFinishLines][kFinishChannels];
  if (inside) {
#pragma unroll 4
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kFinishLines) {
      f(chunk, sums);
    }
  }
  for (int k = 0; k < 3; ++k) {
    shared[k][threadIdx.y][threadIdx.x] = sums[k];
  }
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int k = 0; k < 3; ++k) {
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
  const double origin = inside ? partials[channel] : A(0);
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
    statistics.store(channel, origin + sums[0] / n, sums[2] + (sums[1] - sums[0] * sums[0] / n));
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

template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_forward(G g, const T* __restrict__ x, Channels<A> channels, F f, T* __restrict__ out) {
  wait_for_previous_kernel();
  const Slice<G> slice(g, true);
  if (!slice.inside()) {
    return;
  }
  const Affine<G, A> affine(channels, slice.channel);
  slice.for_each([&](auto count, const int64_t* offsets) {
    Vector<T, G::V> vectors[count.value];
    load_all(x, offsets, vectors);
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

// For each element of a slice, call use(element, c, g, x − mean): its channel c in the vector, its
// gradient g before the activation. `element`, the given gradient, may be overwritten; then call
// store(offset, vector) with the vector.
template <typename G, typename T, typename F, typename A, typename Use, typename Store>
__device__ void for_each_gradient(const Slice<G>& slice, const T* grad, const T* x,
                                  const Affine<G, A>& affine, const F& f, const Use& use,
                                  const Store& store) {
  slice.for_each([&](auto count, const int64_t* offsets) {
    Vector<T, G::V> grads[count.value], inputs[count.value];
    load_all(grad, offsets, grads);
    load_all(x, offsets, inputs);
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

// Σ g and Σ g (x − mean) of each channel and chunk; g is the gradient before the activation.
template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    chunk_gradients(G g, const T* __restrict__ grad, const T* __restrict__ x, Channels<A> channels,
                    F f, A* __restrict__ partials) {
  const Slice<G> slice(g, false);
  A sum[G::kChannels]{}, product[G::kChannels]{};
  if (slice.inside()) {
    const Affine<G, A> affine(channels, slice.channel);
    for_each_gradient(
        slice, grad, x, affine, f,
        [&](T&, int c, A value, A d) {
          sum[c] += value;
          product[c] += value * d;
        },
        [](int64_t, const Vector<T, G::V>&) {});
  }
  add_lines(slice, sum, product, [&](int c, A s, A p) {
    A* to = partials + blockIdx.y * g.channels + slice.channel + c;
    *to = s;
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
  double sums[3]{};
  add_chunks(chunks, inside, sums, [&](int64_t i, double (&sums)[3]) {
    sums[0] += partials[i * channels + channel];
    sums[1] += partials[(chunks + i) * channels + channel];
  });
  if (threadIdx.y == 0 && inside) {
    grad_bias[channel] = static_cast<A>(sums[0]);
    grad_weight[channel] = static_cast<A>(sums[1] * rstd[channel]);
  }
}

// Gradient of the input: scale (g − Σ g / n − x̂ Σ g x̂ / n), x̂ = (x − mean) rstd.
template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_backward(G g, const T* __restrict__ grad, const T* __restrict__ x, Channels<A> channels,
                   F f, const A* __restrict__ grad_weight, const A* __restrict__ grad_bias,
                   A count_inverse, T* __restrict__ out) {
  wait_for_previous_kernel();
  const Slice<G> slice(g, true);
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
  for_each_gradient(
      slice, grad, x, affine, f,
      [&](T& element, int c, A value, A d) {
        element = static_cast<T>(affine.scale[c] * value - offset[c] - d * slope[c]);
      },
      [&](int64_t at, const Vector<T, G::V>& result) { store_vector(out + at, result); });
}

}  // namespace ops::cuda
