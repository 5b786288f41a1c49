// Activations of the LLTM and their derivatives, for tensors of dtype T.
#pragma once

#include <cmath>

#include "core/cuda/common.cuh"

namespace ops::cuda {

// Approximate functions for 16-bit tensors: rounding hides their relative error of about 1e-6.
__device__ inline float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.44269504f * x));
  return result;
}
__device__ inline float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// σ(x) and σ(x) (1 − σ(x)), both without cancellation.
template <typename T>
struct Sigmoid {
  using A = acc_t<T>;
  A value, slope;

  __device__ explicit Sigmoid(A x) {
    if constexpr (sizeof(T) == 2) {
      const A e = fast_exp(-x);
      value = fast_reciprocal(1 + e);
      slope = value * (value > 0 ? e * value : 1);  // not ∞ · 0
    } else {
      const A e = std::exp(x < 0 ? x : -x);
      const A inverse = 1 / (1 + e);
      value = x < 0 ? e * inverse : inverse;
      slope = e * inverse * inverse;
    }
  }
};

// elu(x) and elu'(x)
template <typename T>
struct Elu {
  using A = acc_t<T>;
  A value, slope;

  __device__ explicit Elu(A x) {
    if constexpr (sizeof(T) == 2) {
      const A e = fast_exp(x), series = x * (1 + x * (1 / 2.f + x * (1 / 6.f + x * (1 / 24.f))));
      value = x > 0 ? x : x < -0.125f ? e - 1 : series;
      slope = x > 0 ? 1 : e;
    } else {
      value = x > 0 ? x : std::expm1(x);
      slope = x > 0 ? A(1) : std::exp(x);
    }
  }
};

// tanh(x) and tanh'(x) = 1 − tanh²(x) = 4 e / (1 + e)², e = exp(−2 |x|)
template <typename T>
struct Tanh {
  using A = acc_t<T>;
  A value, slope;

  __device__ explicit Tanh(A x) {
    if constexpr (sizeof(T) == 2) {
      const A e = fast_exp(-2 * fabsf(x)), inverse = fast_reciprocal(1 + e), square = x * x;
      const A series = x * (1 + square * (-1 / 3.f + square * (2 / 15.f)));
      const A quotient = copysignf((1 - e) * inverse, x);
      value = square < 0.015625f ? series : quotient;
      slope = 4 * e * inverse * inverse;
    } else {
      const A e = std::exp(x < 0 ? 2 * x : -2 * x);
      const A inverse = 1 / (1 + e);
      value = std::tanh(x);
      slope = 4 * e * inverse * inverse;
    }
  }
};

}  // namespace ops::cuda
