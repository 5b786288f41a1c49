// Element types, accumulator types and dtype dispatch.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

#include "core/check.h"

// Attribute of functions used by CPU and CUDA kernels, and of formulas: these are inlined into a
// kernel, and compiled for its instruction set.
#ifdef __CUDACC__
#define OPS_DEVICE __host__ __device__
#define OPS_FORMULA __host__ __device__ __forceinline__
#else
#define OPS_DEVICE
#define OPS_FORMULA [[gnu::always_inline]] inline
#endif

namespace ops {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

// Accumulator type: double for double, else float.
template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The dtype of acc_t<T>.
inline ScalarType accumulator_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? dtype : ScalarType::Float;
}

template <typename T>
struct type_tag {
  using type = T;
};

// Call f(type_tag<T>{}) with the C++ type T of `dtype`.
template <typename F>
void dispatch_floating(const char* op, ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Double: return f(type_tag<double>{});
    case ScalarType::Float: return f(type_tag<float>{});
    case ScalarType::Half: return f(type_tag<Half>{});
    case ScalarType::BFloat16: return f(type_tag<BFloat16>{});
    default:
      check(false, op, ": not implemented for dtype ", dtype_name(dtype),
            "; allowed are float64, float32, bfloat16, float16");
  }
}

}  // namespace ops
