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

#include "batch_norm_act2d/op.h"
#include "core/cuda/common.cuh"

namespace ops::cuda {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kBlocks = 4;         // per multiprocessor; without a bound ptxas serialises the loads
constexpr int kColumns = 64;       // of a block, at most
constexpr int kSectorVectors = 4;  // vectors in 32 bytes, at most

// Distribution of a tensor over blocks. Vectors of V elements lie along the channels (NHWC), or
// along the pixels of one channel (NCHW).
template <int kLanes, bool kNhwc>
struct Grid {
  static constexpr int V = kLanes;
  static constexpr bool kAlongChannels = kNhwc;
  static constexpr int kChannels = kNhwc ? V : 1;  // channels of a vector

  int64_t rows;      // vectors of a column
  int64_t channels;  // C
  int64_t plane;     // vectors of a channel in an image (NHWC: 1)
  int columns, lines;
  int64_t tiles, chunk, chunks;  // blocks along the columns; rows of a chunk; blocks along the rows

  // Use about `blocks` blocks per multiprocessor.
  Grid(NormLayout layout, int blocks)
      : rows(layout.count() / (V / kChannels)),
        channels(layout.channels),
        plane(layout.inner / (V / kChannels)) {
    const int64_t vectors = channels / kChannels;
    // Columns of a block: whole sectors. More tiles while over a tenth of the threads would idle.
    const auto width = [&] {
      return std::min(vectors, ceil_div(ceil_div(vectors, tiles), kSectorVectors) * kSectorVectors);
    };
    tiles = kNhwc ? ceil_div(vectors, kColumns) : channels;
    while (kNhwc && vectors > 8 * tiles &&
           10 * (kThreads / width()) * vectors < 9 * kThreads * tiles) {
      ++tiles;
    }
    columns = kNhwc ? static_cast<int>(width()) : 1;
    tiles = ceil_div(vectors, columns);
    lines = kThreads / columns;
    const int64_t wanted =
        ceil_div(blocks * Device::attribute(cudaDevAttrMultiProcessorCount), tiles);
    const int64_t most = std::max<int64_t>(1, rows / (lines * kUnroll));
    chunk = ceil_div(rows, std::min({wanted, most, int64_t{65535}}));
    chunks = ceil_div(rows, chunk);
  }

  dim3 blocks() const { return dim3(tiles, chunks); }
};

// The vectors of one thread.
template <typename G>
struct Slice {
  const G& g;
  int column, line;
  int64_t channel, first, last;  // channel of lane 0; rows of the chunk: [first, last)

  __device__ Slice(const G& g, bool reverse)
      : g(g), column(threadIdx.x % g.columns), line(threadIdx.x / g.columns) {
    const int64_t index = reverse ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    channel = (static_cast<int64_t>(blockIdx.x) * g.columns + column) * G::kChannels;
    first = index * g.chunk;
    last = min(first + g.chunk, g.rows);
  }

  __device__ bool inside() const { return line < g.lines && channel < g.channels; }

  // Return the index of the first element of a vector.
  __device__ int64_t offset(int64_t row) const {
    if constexpr (G::kAlongChannels) {
      return row * g.channels + channel;
    } else {
      const int64_t image = row / g.plane, pixel = row - image * g.plane;
      return ((image * g.channels + channel) * g.plane + pixel) * G::V;
    }
  }

  // Call f(Width<n>{}, offsets) for groups of n vectors.
  template <typename F>
  __device__ void for_each(const F& f) const {
    int64_t row = first + line, at = offset(row);
    [[maybe_unused]] int64_t pixel = row % g.plane;  // NCHW
    const int64_t images = g.lines / g.plane, pixels = g.lines % g.plane;
    const int64_t image_size = g.channels * g.plane * (G::V / G::kChannels);
    const int64_t step = images * image_size + pixels * G::V;
    const auto next = [&] {
      const int64_t result = at;
      at += step;
      if constexpr (!G::kAlongChannels) {
        pixel += pixels;
        if (pixel >= g.plane) {
          pixel -= g.plane;
          at += image_size - g.plane * G::V;
        }
      }
      return result;
    };
    int64_t offsets[kUnroll];
    for (; row + (kUnroll - 1) * g.lines < last; row += kUnroll * g.lines) {
#pragma unroll
      for (int64_t& offset : offsets) {
        offset = next();
      }
      f(Width<kUnroll>{}, offsets);
    }
    for (; row < last; row += g.lines) {
      offsets[0] = next();
      f(Width<1>{}, offsets);
    }
  }
};

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

// Σ g and Σ g (x − mean) of each channel and chunk; g is the gradient before the activation.
template <typename G, typename T, typename F, typename A = acc_t<T>>
__global__ void __launch_bounds__(kThreads, kBlocks)
    chunk_gradients(G g, const T* __restrict__ grad, const T* __restrict__ x, Channels<A> channels,
                    F f, A* __restrict__ partials) {
  const Slice<G> slice(g, false);
  A sum[G::kChannels]{}, product[G::kChannels]{};
  if (slice.inside()) {
    const Affine<G, A> affine(channels, slice.channel);
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
          const A value = f.gradient(static_cast<A>(grads[i].lane[v]), z);
          sum[c] += value;
          product[c] += value * d;
        }
      }
    });
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
        const A value = f.gradient(static_cast<A>(grads[i].lane[v]), z);
        grads[i].lane[v] = static_cast<T>(affine.scale[c] * value - offset[c] - d * slope[c]);
      }
      store_vector(out + offsets[i], grads[i]);
    }
  });
}

}  // namespace ops::cuda
