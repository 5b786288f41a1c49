// gelu: formulas on any device.
#pragma once

#include <ratio>

#include "core/elementwise.h"

namespace ops::gelu {

using Exponent = std::ratio<-1702, 1000>;

// gelu(x) = x σ(1.702 x)
struct Forward {
  static constexpr const char* op = "gelu";

  template <typename T>
  OPS_FORMULA T operator()(T x) const {
    return x / (T(1) + exp_of_multiple<Exponent>(x));
  }
};

// gelu'(x) = s + 1.702 x s (1 − s), s = σ(1.702 x). With e = exp(−1.702 x): s = 1 / (1 + e) and
// 1 − s = e s, without cancellation near s = 1.
struct Backward {
  static constexpr const char *op = "gelu_backward", *saved = "input";

  template <typename T>
  OPS_FORMULA T operator()(T grad_output, T x) const {
    const T e = exp_of_multiple<Exponent>(x);
    const T s = T(1) / (T(1) + e);
    const T rest = select(s > T(0), e * s, T(1));  // not ∞ · 0
    return grad_output * (s + T(1.702) * (x * s * rest));
  }
};

}  // namespace ops::gelu
