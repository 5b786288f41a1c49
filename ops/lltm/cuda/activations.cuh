// Activations of the LLTM and their derivatives.
#pragma once

#include <cmath>

namespace ops::cuda {

// σ(x) and σ(x) (1 − σ(x)), both without cancellation.
template <typename A>
struct Sigmoid {
  A value, slope;

  __device__ explicit Sigmoid(A x) {
    const A e = std::exp(x < 0 ? x : -x);
    const A inverse = 1 / (1 + e);
    value = x < 0 ? e * inverse : inverse;
    slope = e * inverse * inverse;
  }
};

// elu(x) and elu'(x)
template <typename A>
struct Elu {
  A value, slope;

  __device__ explicit Elu(A x) {
    value = x > 0 ? x : std::expm1(x);
    slope = x > 0 ? A(1) : std::exp(x);
  }
};

// tanh(x) and tanh'(x) = 1 − tanh²(x) = 4 e / (1 + e)², e = exp(−2 |x|)
template <typename A>
struct Tanh {
  A value, slope;

  __device__ explicit Tanh(A x) {
    const A e = std::exp(x < 0 ? 2 * x : -2 * x);
    const A inverse = 1 / (1 + e);
    value = std::tanh(x);
    slope = 4 * e * inverse * inverse;
  }
};

}  // namespace ops::cuda
