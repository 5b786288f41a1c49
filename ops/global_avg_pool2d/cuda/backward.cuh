// CUDA global average pooling, backward: broadcast grad / length over the pixels.
//
//   grad [outer, inner]            out [outer, length, inner], in vectors of V
//   ┌────┬────┐  × 1 / length      ┌────┬────┬────┬────┬────┬────┐
//   │ g0 │ g1 │ ─────────────────► │ g0 │ g0 │ g0 │ g1 │ g1 │ g1 │  (NCHW; NHWC repeats pixels)
//   └────┴────┘                    └────┴────┴────┴────┴────┴────┘
//
//   block:   512 adjacent vectors of out
//   shared:  nothing
//   thread:  two vectors, computed before the first store: each in at most two planes (NCHW), in
//   one
//            pixel (NHWC, C divisible by V) or in one image (NHWC)
#pragma once

#include "core/cuda/divide.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {

using namespace cuda;

constexpr int kBroadcastThreads = 256;
constexpr int kBroadcastVectors = 2;  // of a thread

// in_pixel: inner is divisible by V, and grad is aligned.
template <int V, typename T, typename Divider, typename Index = typename Divider::Index>
__global__ void __launch_bounds__(kBroadcastThreads)
    broadcast_kernel(const T* __restrict__ grad, T* __restrict__ out, Index vectors, Index length,
                     Index inner, Divider by_length, Divider by_inner, bool in_pixel) {
  const acc_t<T> scale = acc_t<T>(1) / static_cast<acc_t<T>>(length);
  const auto scaled = [&](T value) { return static_cast<T>(static_cast<acc_t<T>>(value) * scale); };
  const Index start =
      static_cast<Index>(blockIdx.x) * kBroadcastThreads * kBroadcastVectors + threadIdx.x;
  Vector<T, V> values[kBroadcastVectors];
#pragma unroll
  for (int k = 0; k < kBroadcastVectors; ++k) {
    const Index vector = start + k * kBroadcastThreads, first = vector * V;
    if (vector >= vectors) {
      break;
    }
    const Index row = by_inner(first), image = by_length(row), pixel = row - image * length;
    const T* from = grad + image * inner;
    Index channel = first - row * inner;
    if (inner == 1) {
      const T value = scaled(*from), next = pixel + V > length ? scaled(from[1]) : value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        values[k].lane[v] = pixel + v < length ? value : next;
      }
    } else if (in_pixel) {
      values[k] = load_vector<V>(from + channel);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        values[k].lane[v] = scaled(values[k].lane[v]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        values[k].lane[v] = scaled(from[channel]);
        channel = channel + 1 < inner ? channel + 1 : 0;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kBroadcastVectors; ++k) {
    if (const Index vector = start + k * kBroadcastThreads; vector < vectors) {
      store_vector(out + vector * V, values[k]);
    }
  }
}

template <typename T>
void broadcast(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
  constexpr int kWidest = kVectorBytes / sizeof(T);
  const int64_t n = layout.outer * layout.length * layout.inner;
  const bool two_planes = layout.inner == 1 && layout.length >= kWidest;
  const auto launch = [&](auto tag) {
    using Divider = typename decltype(tag)::type;
    using Index = typename Divider::Index;
    dispatch_width<T>({out}, {two_planes ? n : layout.length * layout.inner}, [&](auto v) {
      const int64_t vectors = n / v.value;
      const bool in_pixel = layout.inner % v.value == 0 && are_aligned({grad}, v.value * sizeof(T));
      launch_kernel(broadcast_kernel<v.value, T, Divider>,
                    ceil_div(vectors, kBroadcastThreads * kBroadcastVectors), kBroadcastThreads, 0,
                    current_stream(like), grad, out, static_cast<Index>(vectors),
                    static_cast<Index>(layout.length), static_cast<Index>(layout.inner),
                    Divider{layout.length}, Divider{layout.inner}, in_pixel);
    });
  };
  n < kMostFastDivided ? launch(type_tag<FastDivide>{}) : launch(type_tag<Divide>{});
}

}  // namespace ops::global_avg_pool2d
