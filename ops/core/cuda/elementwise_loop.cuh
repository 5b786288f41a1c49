// CUDA loop of elementwise operators.
#pragma once

#include "core/cuda/common.cuh"
#include "core/elementwise.h"

namespace ops::cuda {

constexpr int kPointwiseThreads = 256;

// float with approximate division and exp, in formulas of 16-bit tensors: exact functions would
// exceed the memory time, and rounding hides the error of about 1e-6.
struct FastFloat {
  float value;

  __device__ FastFloat(float x) : value(x) {}
  __device__ explicit operator float() const { return value; }

  __device__ friend FastFloat operator-(FastFloat a) { return -a.value; }
  __device__ friend FastFloat operator+(FastFloat a, FastFloat b) { return a.value + b.value; }
  __device__ friend FastFloat operator-(FastFloat a, FastFloat b) { return a.value - b.value; }
  __device__ friend FastFloat operator*(FastFloat a, FastFloat b) { return a.value * b.value; }
  __device__ friend FastFloat operator/(FastFloat a, FastFloat b) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(b.value));
    return a.value * inverse;
  }
  __device__ friend bool operator<(FastFloat a, FastFloat b) { return a.value < b.value; }
  __device__ friend bool operator>(FastFloat a, FastFloat b) { return a.value > b.value; }
  __device__ friend FastFloat exp(FastFloat x) { return __expf(x.value); }
};

// The type in which formulas compute.
template <typename T>
using formula_t = std::conditional_t<sizeof(T) == 2, FastFloat, acc_t<T>>;

// Blocks per SM. Full occupancy (2,048 threads) hides memory latency; several vectors per thread
// would spread over more DRAM pages and lose bandwidth. double needs more registers.
template <typename T>
constexpr int kPointwiseBlocks = sizeof(T) == 8 ? 1 : 2048 / kPointwiseThreads;

// Compute out[i] = f(in[i]...); V elements per thread.
template <int V, typename T, typename F, typename... In>
__global__ void __launch_bounds__(kPointwiseThreads, kPointwiseBlocks<T>)
    pointwise_kernel(T* __restrict__ out, int64_t n, F f, const In* __restrict__... in) {
  int64_t i = (static_cast<int64_t>(blockIdx.x) * kPointwiseThreads + threadIdx.x) * V;
  const auto compute = [&](const auto&... x) {
    return static_cast<T>(static_cast<acc_t<T>>(f(static_cast<formula_t<T>>(x)...)));
  };
  if (i + V <= n) {
    const auto store = [&](const Vector<In, V>&... x) {
      Vector<T, V> y;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        y.lane[v] = compute(x.lane[v]...);
      }
      *reinterpret_cast<Vector<T, V>*>(out + i) = y;
    };
    return store(load_vector<V>(in + i)...);
  }
  for (; i < n; ++i) {
    out[i] = compute(in[i]...);
  }
}

struct Loop {
  // Compute out[i] = f(in[i]...). All tensors are dense, with the layout of `like`.
  template <typename T, typename F, typename... In>
  static void run(const Tensor& like, T* out, const F& f, const In*... in) {
    const int64_t n = like.numel();
    if (n == 0) {
      return;
    }
    const DeviceGuard guard(like.get_device_index());
    dispatch_width<T>({out, in...}, {}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const int64_t blocks = ceil_div(n, int64_t{kPointwiseThreads} * V);
      pointwise_kernel<V><<<blocks, kPointwiseThreads, 0, current_stream(like)>>>(out, n, f, in...);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

using Elementwise = ops::Elementwise<Loop>;

}  // namespace ops::cuda
