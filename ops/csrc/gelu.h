// The formulas of gelu, for both devices.
#pragma once

#include <cmath>

#include "pointwise.h"

namespace ops {

// gelu(x) = x σ(1.702 x)
struct GeluForward {
  template <typename T>
  OPS_DEVICE T operator()(T x) const {
    return x / (T(1) + std::exp(T(-1.702) * x));
  }
};

// gelu'(x) = s + 1.702 x s (1 − s), s = σ(1.702 x)
struct GeluBackward {
  template <typename T>
  OPS_DEVICE T operator()(T grad_output, T x) const {
    const T s = T(1) / (T(1) + std::exp(T(-1.702) * x));
    return grad_output * (s + T(1.702) * (x * s * (T(1) - s)));  // 1.702 x alone may overflow
  }
};

}  // namespace ops
