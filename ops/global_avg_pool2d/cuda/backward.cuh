// The gradient of global average pooling: a number a plane, spread over it.
#pragma once

#include "core/cuda/divide.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::cuda {

constexpr int kSpreadThreads = 256;

// What is spread, the gradient [outer, inner] over [outer, length, inner] of n elements: vectors of
// kLanes, of which a thread makes kVectors.
template <int kLanes, int kVectorsOfThread, typename T, typename DivideBy>
struct Spread {
  using Type = T;
  using Index = typename DivideBy::Index;
  static constexpr int V = kLanes, kVectors = kVectorsOfThread;

  const T* grad;
  Index n, length, inner;
  DivideBy by_length, by_inner;
  acc_t<T> scale;

  __device__ T scaled(Index i) const {
    return static_cast<T>(static_cast<acc_t<T>>(grad[i]) * scale);
  }
};

// Contiguous planes (inner is 1) of V elements or more: a vector ends in the plane that it begins
// in, or in the next.
template <int V, typename T, typename DivideBy>
struct SpreadPlanes : Spread<V, 2, T, DivideBy> {
  using typename Spread<V, 2, T, DivideBy>::Index;

  __device__ Vector<T, V> operator()(Index first) const {
    const Index plane = this->by_length(first);
    const Index end = (plane + 1) * this->length;
    const T value = this->scaled(plane);
    const T next = end - first < V && end < this->n ? this->scaled(plane + 1) : value;
    Vector<T, V> result;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      result.lane[v] = v < end - first ? value : next;
    }
    return result;
  }
};

// Channels last, where pixels are whole vectors.
template <int V, typename T, typename DivideBy>
struct SpreadPixels : Spread<V, 2, T, DivideBy> {
  using typename Spread<V, 2, T, DivideBy>::Index;

  __device__ Vector<T, V> operator()(Index first) const {
    const Index pixel = this->by_inner(first), image = this->by_length(pixel);
    auto result = load_vector<V>(this->grad + first - (pixel - image) * this->inner);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      result.lane[v] = static_cast<T>(static_cast<acc_t<T>>(result.lane[v]) * this->scale);
    }
    return result;
  }
};

// Channels last, where images are whole vectors, which reach over pixels.
template <int V, typename T, typename DivideBy>
struct SpreadAcross : Spread<V, 1, T, DivideBy> {
  using typename Spread<V, 1, T, DivideBy>::Index;

  __device__ Vector<T, V> operator()(Index first) const {
    const Index pixel = this->by_inner(first), image = this->by_length(pixel);
    Index channel = first - pixel * this->inner;
    Vector<T, V> result;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      result.lane[v] = this->scaled(image * this->inner + channel);
      channel = channel + 1 < this->inner ? channel + 1 : 0;
    }
    return result;
  }
};

template <typename Source, typename T = typename Source::Type>
__global__ void __launch_bounds__(kSpreadThreads) spread_kernel(Source source, T* out) {
  using Index = typename Source::Index;
  constexpr int V = Source::V, kVectors = Source::kVectors;
  const Index first =
      (static_cast<Index>(blockIdx.x) * kVectors * kSpreadThreads + threadIdx.x) * V;
  Vector<T, V> results[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Index i = first + k * kSpreadThreads * V;
    if (i < source.n) {
      results[k] = source(i);
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Index i = first + k * kSpreadThreads * V;
    if (i + V <= source.n) {
      *reinterpret_cast<Vector<T, V>*>(out + i) = results[k];
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (i + v < source.n) {
          out[i + v] = results[k].lane[v];
        }
      }
    }
  }
}

// Launches what writes out [outer, length, inner].
template <typename T>
void spread(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
  constexpr int kWidest = kVectorBytes / sizeof(T);  // a new tensor is aligned
  const int64_t n = layout.outer * layout.length * layout.inner;
  const auto launch = [&](auto tag) {
    using Source = typename decltype(tag)::type;
    using Index = typename Source::Index;
    const Source source{{grad, static_cast<Index>(n), static_cast<Index>(layout.length),
                         static_cast<Index>(layout.inner),
                         decltype(Source::by_length){layout.length},
                         decltype(Source::by_inner){layout.inner},
                         acc_t<T>(1) / static_cast<acc_t<T>>(layout.length)}};
    launch_kernel(spread_kernel<Source>,
                  ceil_div(n, int64_t{kSpreadThreads} * Source::kVectors * Source::V),
                  kSpreadThreads, 0, current_stream(like), source, out);
  };
  const auto with_divide = [&](auto tag) {
    using D = typename decltype(tag)::type;
    if (layout.inner == 1 && layout.length < kWidest) {
      launch(type_tag<SpreadPlanes<1, T, D>>{});
    } else if (layout.inner == 1) {
      launch(type_tag<SpreadPlanes<kWidest, T, D>>{});
    } else if (layout.inner % kWidest == 0 &&
               reinterpret_cast<uintptr_t>(grad) % kVectorBytes == 0) {
      launch(type_tag<SpreadPixels<kWidest, T, D>>{});
    } else {
      dispatch_width<T>({out}, {layout.length * layout.inner},
                        [&](auto v) { launch(type_tag<SpreadAcross<v.value, T, D>>{}); });
    }
  };
  n < kMostFastDivided ? with_divide(type_tag<FastDivide>{}) : with_divide(type_tag<Divide>{});
}

}  // namespace ops::cuda
