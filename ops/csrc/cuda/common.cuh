// What the CUDA kernels share: device, stream, vector access.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "common.h"

namespace ops::cuda {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// N elements that move as one load or store.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T lane[N];
};

constexpr int kVectorBytes = 16;

template <int V>
using Width = std::integral_constant<int, V>;

// Calls f(Width<V>{}) with the widest V of which every pointer is a multiple and that divides every
// extent (elements): 16 bytes, or a half, a quarter, … of it, down to single elements.
template <typename T, typename F, int V = kVectorBytes / sizeof(T)>
void dispatch_width(std::initializer_list<const void*> pointers,
                    std::initializer_list<int64_t> extents, const F& f) {
  if constexpr (V > 1) {
    bool fits = true;
    for (const void* p : pointers) {
      fits &= reinterpret_cast<uintptr_t>(p) % (V * sizeof(T)) == 0;
    }
    for (int64_t n : extents) {
      fits &= n % V == 0;
    }
    if (!fits) {
      return dispatch_width<T, F, V / 2>(pointers, extents, f);
    }
  }
  f(Width<V>{});
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace ops::cuda
