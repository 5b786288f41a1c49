// The CUDA loop behind every elementwise operator.
#pragma once

#include "common.cuh"
#include "pointwise.h"

namespace ops::cuda {

constexpr int kPointwiseThreads = 256;
constexpr int kMostVectors = 4;     // a thread: independent loads in flight
constexpr int kBlocksForMost = 32;  // a multiprocessor: with fewer, the last ones would idle it

// The functor that computes F for tensors of T, where that is another one.
template <typename F, typename T>
struct ForStorage {
  using type = F;
};

// out[i] = f(in[i]...) in acc_t<T>, kVectors accesses of V elements a thread, a contiguous stretch
// a block.
template <int V, int kVectors, typename T, typename F, typename... In>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_kernel(T* __restrict__ out, int64_t n, F f, const In* __restrict__... in) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kPointwiseThreads * kVectors + threadIdx.x) * V;
  const auto store = [&](int64_t i, const Vector<In, V>&... x) {
    Vector<T, V> y;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      y.lane[v] = static_cast<T>(f(static_cast<acc_t<T>>(x.lane[v])...));
    }
    *reinterpret_cast<Vector<T, V>*>(out + i) = y;
  };
  const auto vector = [&](int k) {
    return first + static_cast<int64_t>(k) * kPointwiseThreads * V;
  };
  if (vector(kVectors - 1) + V <= n) {  // no branch between the loads
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      store(vector(k), load_vector<V>(in + vector(k))...);
    }
    return;
  }
#pragma unroll 1
  for (int k = 0; k < kVectors; ++k) {
    const int64_t end = min(vector(k) + V, n);
    for (int64_t i = vector(k); i < end; ++i) {
      out[i] = static_cast<T>(f(static_cast<acc_t<T>>(in[i])...));
    }
  }
}

struct PointwiseLoop {
  // All laid out as `like`, which is dense.
  template <typename T, typename F, typename... In>
  static void run(const Tensor& like, T* out, const F&, const In*... in) {
    const int64_t n = like.numel();
    if (n == 0) {
      return;
    }
    const DeviceGuard guard(like.get_device_index());
    const typename ForStorage<F, T>::type f{};
    dispatch_width<T>({out, in...}, {}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const auto launch = [&](auto vectors) {
        const int64_t blocks = ceil_div(n, int64_t{kPointwiseThreads} * vectors.value * V);
        pointwise_kernel<V, vectors.value>
            <<<blocks, kPointwiseThreads, 0, current_stream(like)>>>(out, n, f, in...);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
      };
      if (n >= int64_t{kPointwiseThreads} * kMostVectors * V * kBlocksForMost *
                   Device().multiprocessors) {
        launch(Width<kMostVectors>{});
      } else {
        launch(Width<1>{});
      }
    });
  }
};

}  // namespace ops::cuda
