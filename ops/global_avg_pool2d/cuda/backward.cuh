// CUDA global average pooling, backward: broadcast grad / length over the pixels.
//
//   grad [outer, inner]            out [outer, length, inner], in vectors of V
//   ┌────┬────┐  × 1 / length      ┌────┬────┬────┬────┬────┬────┐
//   │ g0 │ g1 │ ─────────────────► │ g0 │ g0 │ g0 │ g1 │ g1 │ g1 │  (NCHW; NHWC repeats pixels)
//   └────┴────┘                    └────┴────┴────┴────┴────┴────┘
//
//   block:   256 adjacent vectors of out
//   shared:  nothing
//   thread:  one vector: in at most two planes (NCHW), in one pixel (NHWC, C divisible by V), or
//   any
#pragma once

#include "core/cuda/divide.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {

using namespace cuda;

constexpr int kBroadcastThreads = 256;

// in_pixel: inner is divisible by V, and grad is aligned.
template <int V, typename T, typename Divider, typename Index = typename Divider::Index>
__global__ void __launch_bounds__(kBroadcastThreads)
    broadcast_kernel(const T* __restrict__ grad, T* __restrict__ out, Index vectors, Index length,
                     Index inner, Divider by_length, Divider by_inner, bool in_pixel) {
  const Index vector = static_cast<Index>(blockIdx.x) * kBroadcastThreads + threadIdx.x;
  if (vector >= vectors) {
    return;
  }
  const Index first = vector * V, row = by_inner(first);
  Index image = by_length(row), pixel = row - image * length, channel = first - row * inner;
  Vector<T, V> values;
  if (inner == 1 && length >= V) {
    const T value = grad[image], next = pixel + V > length ? grad[image + 1] : value;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      values.lane[v] = pixel + v < length ? value : next;
    }
  } else if (in_pixel) {
    values = load_vector<V>(grad + image * inner + channel);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      values.lane[v] = grad[image * inner + channel];
      if (++channel == inner) {
        channel = 0;
        if (++pixel == length) {
          pixel = 0;
          ++image;
        }
      }
    }
  }
  const acc_t<T> scale = acc_t<T>(1) / static_cast<acc_t<T>>(length);
  acc_t<T> scaled[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    scaled[v] = static_cast<acc_t<T>>(values.lane[v]) * scale;
  }
  store_vector<V>(out + first, scaled);
}

template <typename T>
void broadcast(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
  const int64_t n = layout.outer * layout.length * layout.inner;
  const auto launch = [&](auto tag) {
    using Divider = typename decltype(tag)::type;
    using Index = typename Divider::Index;
    dispatch_width<T>({out}, {n}, [&](auto v) {
      const int64_t vectors = n / v.value;
      const bool in_pixel = layout.inner % v.value == 0 && are_aligned({grad}, v.value * sizeof(T));
      launch_kernel(broadcast_kernel<v.value, T, Divider>, ceil_div(vectors, kBroadcastThreads),
                    kBroadcastThreads, 0, current_stream(like), grad, out,
                    static_cast<Index>(vectors), static_cast<Index>(layout.length),
                    static_cast<Index>(layout.inner), Divider{layout.length}, Divider{layout.inner},
                    in_pixel);
    });
  };
  n < kMostFastDivided ? launch(type_tag<FastDivide>{}) : launch(type_tag<Divide>{});
}

}  // namespace ops::global_avg_pool2d
