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

namespace ops::global_avg_pool2d {

using namespace cuda;

constexpr int kBroadcastThreads = 256;

// Pixels of a vector of out. kPlanes: NCHW (inner = 1) with length ≥ V, in at most two planes.
// kOne: NHWC with inner divisible by V. kAny: NHWC with length · inner divisible by V, in one
// image.
enum class Pixels { kPlanes, kOne, kAny };

// Vectors of V of the n = outer · length · inner elements of out, kVectors per thread.
template <Pixels kPixels, int kLanes, typename ElementType, typename Divider>
struct Broadcast {
  using T = ElementType;
  using Index = typename Divider::Index;
  static constexpr int V = kLanes, kVectors = kPixels == Pixels::kAny ? 1 : 2;

  const T* grad;
  Index n, length, inner;
  Divider by_length, by_inner;
  acc_t<T> scale;

  __device__ T scaled(T value) const {
    return static_cast<T>(static_cast<acc_t<T>>(value) * scale);
  }

  // Return the vector from element `first` on.
  __device__ Vector<T, V> operator()(Index first) const {
    Vector<T, V> result;
    if constexpr (kPixels == Pixels::kPlanes) {
      const Index plane = by_length(first), end = (plane + 1) * length;
      const T value = scaled(grad[plane]);
      const T next = end - first < V && end < n ? scaled(grad[plane + 1]) : value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.lane[v] = v < end - first ? value : next;
      }
      return result;
    }
    const Index pixel = by_inner(first), image = by_length(pixel);
    if constexpr (kPixels == Pixels::kOne) {
      result = load_vector<V>(grad + first - (pixel - image) * inner);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.lane[v] = scaled(result.lane[v]);
      }
    } else {
      Index channel = first - pixel * inner;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.lane[v] = scaled(grad[image * inner + channel]);
        channel = channel + 1 < inner ? channel + 1 : 0;
      }
    }
    return result;
  }
};

template <typename Source, typename T = typename Source::T>
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
    const Source source{grad,
                        static_cast<Index>(n),
                        static_cast<Index>(layout.length),
                        static_cast<Index>(layout.inner),
                        decltype(Source::by_length){layout.length},
                        decltype(Source::by_inner){layout.inner},
                        acc_t<T>(1) / static_cast<acc_t<T>>(layout.length)};
    launch_kernel(broadcast_kernel<Source>,
                  ceil_div(n, int64_t{kBroadcastThreads} * Source::kVectors * Source::V),
                  kBroadcastThreads, 0, current_stream(like), source, out);
  };
  const auto dispatch_layout = [&](auto tag) {
    using D = typename decltype(tag)::type;
    if (layout.inner == 1 && layout.length < kWidest) {
      launch(type_tag<Broadcast<Pixels::kPlanes, 1, T, D>>{});
    } else if (layout.inner == 1) {
      launch(type_tag<Broadcast<Pixels::kPlanes, kWidest, T, D>>{});
    } else if (layout.inner % kWidest == 0 && are_aligned({grad}, kVectorBytes)) {
      launch(type_tag<Broadcast<Pixels::kOne, kWidest, T, D>>{});
    } else {
      dispatch_width<T>({out}, {layout.length * layout.inner}, [&](auto v) {
        launch(type_tag<Broadcast<Pixels::kAny, v.value, T, D>>{});
      });
    }
  };
  n < kMostFastDivided ? dispatch_layout(type_tag<FastDivide>{})
                       : dispatch_layout(type_tag<Divide>{});
}

}  // namespace ops::global_avg_pool2d
