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
//            one pixel (NHWC, C divisible by V) or in one image (NHWC)
#include "core/cuda/divide.cuh"
#include "global_avg_pool2d/op.h"

namespace ops::global_avg_pool2d {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kThreadVectors = 2;

// in_pixel: inner is divisible by V, and grad is aligned.
template <int V, typename T, typename Divider, typename Index = typename Divider::Index>
__global__ void __launch_bounds__(kThreads)
    broadcast_kernel(const T* __restrict__ grad, T* __restrict__ out, Index vectors, Index length,
                     Index inner, Divider by_length, Divider by_inner, bool in_pixel) {
  const acc_t<T> scale = acc_t<T>(1) / static_cast<acc_t<T>>(length);
  const auto scaled = [&](T value) { return static_cast<T>(static_cast<acc_t<T>>(value) * scale); };
  const Index start = static_cast<Index>(blockIdx.x) * kThreads * kThreadVectors + threadIdx.x;
  Vector<T, V> values[kThreadVectors];
#pragma unroll
  for (int k = 0; k < kThreadVectors; ++k) {
    const Index vector = start + k * kThreads, first = vector * V;
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
  for (int k = 0; k < kThreadVectors; ++k) {
    if (const Index vector = start + k * kThreads; vector < vectors) {
      store_vector(out + vector * V, values[k]);
    }
  }
}

struct Backward {
  template <typename T>
  static void backward(const Tensor& like, PoolLayout layout, const T* grad, T* out) {
    constexpr int kWidest = kVectorBytes / sizeof(T);
    const DeviceGuard guard(like.get_device_index());
    const int64_t length = layout.length, inner = layout.inner, n = layout.outer * length * inner;
    const bool two_planes = inner == 1 && length >= kWidest;
    dispatch_width<T>({out}, {two_planes ? n : length * inner}, [&](auto v) {
      const bool in_pixel = inner % v.value == 0 && are_aligned({grad}, v.value * sizeof(T));
      const auto launch = [&](auto tag) {
        using Divider = typename decltype(tag)::type;
        using Index = typename Divider::Index;
        const Index vectors = n / v.value;
        launch_kernel(broadcast_kernel<v.value, T, Divider>,
                      ceil_div(vectors, kThreads * kThreadVectors), kThreads, 0,
                      current_stream(like), grad, out, vectors, static_cast<Index>(length),
                      static_cast<Index>(inner), Divider(length), Divider(inner), in_pixel);
      };
      n < kMostFastDivided ? launch(type_tag<FastDivide>{}) : launch(type_tag<Divide>{});
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("global_avg_pool2d_backward", TORCH_BOX(&backward<Backward>));
}

}  // namespace ops::global_avg_pool2d
