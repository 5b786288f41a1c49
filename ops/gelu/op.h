// gelu: formulas on any device.
#pragma once

#include <cmath>

#include "core/elementwise.h"

namespace ops {

// gelu(x) = x σ(1.702 x)
struct GeluForward {
  template <typename T>
  OPS_DEVICE T operator()(T x) const {
    return x / (T(1) + std::exp(T(-1.702) * x));
  }
};

// gelu'(x) = s + 1.702 x s (1 − s), s = σ(1.702 x). With e = exp(−1.702 x): s = 1 / (1 + e) and
// 1 − s = e s, without cancellation near s = 1.
struct GeluBackward {
  template <typename T>
  OPS_DEVICE T operator()(T grad_output, T x) const {
    const T e = std::exp(T(-1.702) * x);
    const T s = T(1) / (T(1) + e);
    const T rest = s > T(0) ? e * s : T(1);  // not ∞ · 0
    return grad_output * (s + T(1.702) * (x * s * rest));
  }
};

// `Loop` is the elementwise loop of a device.
template <typename Loop>
Tensor gelu(const Tensor& input) {
  return map<Loop>("gelu", input, GeluForward{});
}

template <typename Loop>
Tensor gelu_backward(const Tensor& grad_output, const Tensor& input) {
  return map_backward<Loop>("gelu_backward", grad_output, "input", input, GeluBackward{});
}

}  // namespace ops
