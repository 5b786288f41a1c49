// CUDA global average pooling, backward: broadcast grad / length over the pixels.
//
//   grad [outer, inner]            out [outer, length, inner], in vectors of V
//   ┌────┬────┐  × 1 / length      ┌────┬────┬────┬────┬────┬────┐
//   │ g0 │ g1 │ ─────────────────► │ g0 │ g0 │ g0 │ g1 │ g1 │ g1 │  (NCHW; NHWC repeats pixels)
//   └────┴────┘                    └────┴────┴────┴────┴────┴────┘
//
//   block:   256 × kVectors adjacent vectors of out
//   shared:  nothing
//   thread:  kVectors vectors, 256 vectors apart, computed before the first store
#pragma once

#include "core/cuda/divide.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::cuda {

constexpr int kBroadcastThreads = 256;

// Parameters: n = outer · length · inner elements of out, vectors of kLanes, kVectors per thread.
template <int kLanes, int kThreadVectors, typename T, typename Divider>
struct Broadcast {
  using Type = T;
  using Index = typename Divider::Index;
  static constexpr int V = kLanes, kVectors = kThreadVectors;

  const T* grad;
  Index n, length, inner;
  Divider by_length, by_inner;
  acc_t<T> scale;

  __device__ T scaled(Index i) const {
    return static_cast<T>(static_cast<acc_t<T>>(grad[i]) * scale);
  }
};

// NCHW (inner = 1) with length ≥ V: a vector lies in at most two planes.
template <int V, typename T, typename Divider>
struct BroadcastPlanes : Broadcast<V, 2, T, Divider> {
  using typename Broadcast<V, 2, T, Divider>::Index;

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

// NHWC with inner divisible by V: a vector lies in one pixel.
template <int V, typename T, typename Divider>
struct BroadcastPixels : Broadcast<V, 2, T, Divider> {
  using typename Broadcast<V, 2, T, Divider>::Index;

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

// NHWC with length · inner divisible by V: a vector may span pixels of one image.
template <int V, typename T, typename Divider>
struct BroadcastUnaligned : Broadcast<V, 1, T, Divider> {
  using typename Broadcast<V, 1, T, Divider>::Index;

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
__global__ void __launch_bounds__(kBroadcastThreads) broadcast_kernel(Source source, T* out) {
  using Index = typename Source::Index;
  constexpr int V = Source::V, kVectors = Source::kVectors;
  const Index first =
      (static_cast<Index>(blockIdx.x) * kVectors * kBroadcastThreads + threadIdx.x) * V;
  Vector<T, V> results[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Index i = first + k * kBroadcastThreads * V;
    if (i < source.n) {
      results[k] = source(i);
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Index i = first + k * kBroadcastThreads * V;
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

// Choose and launch the kernel.
template <typename T>
void broadcast(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
  constexpr int kWidest = kVectorBytes / sizeof(T);  // `out` is a new tensor: aligned
  const int64_t n = layout.outer * layout.length * layout.inner;
  const auto launch = [&](auto tag) {
    using Source = typename decltype(tag)::type;
    using Index = typename Source::Index;
    const Source source{{grad, static_cast<Index>(n), static_cast<Index>(layout.length),
                         static_cast<Index>(layout.inner),
                         decltype(Source::by_length){layout.length},
                         decltype(Source::by_inner){layout.inner},
                         acc_t<T>(1) / static_cast<acc_t<T>>(layout.length)}};
    launch_kernel(broadcast_kernel<Source>,
                  ceil_div(n, int64_t{kBroadcastThreads} * Source::kVectors * Source::V),
                  kBroadcastThreads, 0, current_stream(like), source, out);
  };
  const auto dispatch_layout = [&](auto tag) {
    using D = typename decltype(tag)::type;
    if (layout.inner == 1 && layout.length < kWidest) {
      launch(type_tag<BroadcastPlanes<1, T, D>>{});
    } else if (layout.inner == 1) {
      launch(type_tag<BroadcastPlanes<kWidest, T, D>>{});
    } else if (layout.inner % kWidest == 0 && are_aligned({grad}, kVectorBytes)) {
      launch(type_tag<BroadcastPixels<kWidest, T, D>>{});
    } else {
      dispatch_width<T>({out}, {layout.length * layout.inner},
                        [&](auto v) { launch(type_tag<BroadcastUnaligned<v.value, T, D>>{}); });
    }
  };
  n < kMostFastDivided ? dispatch_layout(type_tag<FastDivide>{})
                       : dispatch_layout(type_tag<Divide>{});
}

}  // namespace ops::cuda
