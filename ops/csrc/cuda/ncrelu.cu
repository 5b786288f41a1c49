#include "common.cuh"
#include "ncrelu.h"

namespace ops::cuda {
namespace {

constexpr int kThreads = 256;

// One thread a vector of V elements; V divides layout.inner, so a vector never crosses rows.
template <int V, typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, T* __restrict__ out, HalvesLayout layout) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= layout.outer * layout.inner) {
    return;
  }
  const auto value = *reinterpret_cast<const Vector<T, V>*>(x + i);
  Vector<T, V> positive, negative;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const acc_t<T> lane = static_cast<acc_t<T>>(value.lane[v]);
    positive.lane[v] = static_cast<T>(positive_part(lane));
    negative.lane[v] = static_cast<T>(negative_part(lane));
  }
  T* first = out + i + i / layout.inner * layout.inner;  // row r starts at 2 r inner
  *reinterpret_cast<Vector<T, V>*>(first) = positive;
  *reinterpret_cast<Vector<T, V>*>(first + layout.inner) = negative;
}

template <int V, typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ grad, const T* __restrict__ x, T* __restrict__ out,
                    HalvesLayout layout) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= layout.outer * layout.inner) {
    return;
  }
  const T* first = grad + i + i / layout.inner * layout.inner;
  const auto value = *reinterpret_cast<const Vector<T, V>*>(x + i);
  const auto positive = *reinterpret_cast<const Vector<T, V>*>(first);
  const auto negative = *reinterpret_cast<const Vector<T, V>*>(first + layout.inner);
  Vector<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    result.lane[v] = static_cast<T>(ncrelu_gradient<acc_t<T>>(
        static_cast<acc_t<T>>(value.lane[v]), static_cast<acc_t<T>>(positive.lane[v]),
        static_cast<acc_t<T>>(negative.lane[v])));
  }
  *reinterpret_cast<Vector<T, V>*>(out + i) = result;
}

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, HalvesLayout layout, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_width<T>({x, out}, {layout.inner}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const int64_t blocks = ceil_div(layout.outer * layout.inner, int64_t{kThreads} * V);
      forward_kernel<V><<<blocks, kThreads, 0, current_stream(like)>>>(x, out, layout);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  template <typename T>
  static void backward(const Tensor& like, HalvesLayout layout, const T* grad, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_width<T>({grad, x, out}, {layout.inner}, [&](auto v) {
      constexpr int V = decltype(v)::value;
      const int64_t blocks = ceil_div(layout.outer * layout.inner, int64_t{kThreads} * V);
      backward_kernel<V><<<blocks, kThreads, 0, current_stream(like)>>>(grad, x, out, layout);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("ncrelu", TORCH_BOX(&ncrelu<Loops>));
  m.impl("ncrelu_backward", TORCH_BOX(&ncrelu_backward<Loops>));
}

}  // namespace ops::cuda
