#include "common.cuh"
#include "divide.cuh"
#include "ncrelu.h"

namespace ops::cuda {
namespace {

constexpr int kThreads = 256;

// Where a thread's vector lies: `i` in the input, and its halves in the output, where row r starts
// at 2 r inner. Rows are whole numbers of vectors.
template <int V, typename Row>
struct Place {
  bool inside;
  int64_t i, positive, negative;

  __device__ Place(int64_t vectors, int64_t inner, const Row& row_of) {
    using Index = typename Row::Index;
    const Index vector = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
    inside = vector < vectors;
    i = static_cast<int64_t>(vector) * V;
    positive = i + row_of(vector) * inner;
    negative = positive + inner;
  }
};

template <int V, typename Row, typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t vectors, int64_t inner,
                   Row row_of) {
  const Place<V, Row> at(vectors, inner, row_of);
  if (!at.inside) {
    return;
  }
  const auto value = *reinterpret_cast<const Vector<T, V>*>(x + at.i);
  Vector<T, V> positive, negative;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const acc_t<T> lane = static_cast<acc_t<T>>(value.lane[v]);
    positive.lane[v] = static_cast<T>(positive_part(lane));
    negative.lane[v] = static_cast<T>(negative_part(lane));
  }
  *reinterpret_cast<Vector<T, V>*>(out + at.positive) = positive;
  *reinterpret_cast<Vector<T, V>*>(out + at.negative) = negative;
}

template <int V, typename Row, typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ grad, const T* __restrict__ x, T* __restrict__ out,
                    int64_t vectors, int64_t inner, Row row_of) {
  const Place<V, Row> at(vectors, inner, row_of);
  if (!at.inside) {
    return;
  }
  const auto value = *reinterpret_cast<const Vector<T, V>*>(x + at.i);
  const auto positive = *reinterpret_cast<const Vector<T, V>*>(grad + at.positive);
  const auto negative = *reinterpret_cast<const Vector<T, V>*>(grad + at.negative);
  Vector<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    result.lane[v] = static_cast<T>(ncrelu_gradient<acc_t<T>>(
        static_cast<acc_t<T>>(value.lane[v]), static_cast<acc_t<T>>(positive.lane[v]),
        static_cast<acc_t<T>>(negative.lane[v])));
  }
  *reinterpret_cast<Vector<T, V>*>(out + at.i) = result;
}

// Calls f(Width<V>{}, vectors, row_of) with the widest vectors that the layout and pointers allow.
template <typename T, typename F>
void dispatch_vectors(HalvesLayout layout, std::initializer_list<const void*> pointers,
                      const F& f) {
  dispatch_width<T>(pointers, {layout.inner}, [&](auto v) {
    const int64_t row = layout.inner / v.value;
    const int64_t vectors = layout.outer * row;
    if (vectors < kMostFastDivided - kThreads) {
      f(v, vectors, FastDivide(row));
    } else {
      f(v, vectors, Divide{row});
    }
  });
}

struct Loops {
  template <typename T>
  static void forward(const Tensor& like, HalvesLayout layout, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_vectors<T>(layout, {x, out}, [&](auto v, int64_t vectors, auto row_of) {
      forward_kernel<v.value><<<ceil_div(vectors, kThreads), kThreads, 0, current_stream(like)>>>(
          x, out, vectors, layout.inner, row_of);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  template <typename T>
  static void backward(const Tensor& like, HalvesLayout layout, const T* grad, const T* x, T* out) {
    const DeviceGuard guard(like.get_device_index());
    dispatch_vectors<T>(layout, {grad, x, out}, [&](auto v, int64_t vectors, auto row_of) {
      backward_kernel<v.value><<<ceil_div(vectors, kThreads), kThreads, 0, current_stream(like)>>>(
          grad, x, out, vectors, layout.inner, row_of);
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
