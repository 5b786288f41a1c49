// exp: formulas on any device.
#pragma once

#include <cmath>

#include "core/elementwise.h"

namespace ops {

struct ExpForward {
  template <typename T>
  OPS_DEVICE T operator()(T x) const {
    return std::exp(x);
  }
};

// exp' = exp: the derivative is the output.
struct ExpBackward {
  template <typename T>
  OPS_DEVICE T operator()(T grad_output, T output) const {
    return grad_output * output;
  }
};

// `Loop` is the elementwise loop of a device.
template <typename Loop>
Tensor exp(const Tensor& input) {
  return map<Loop>("exp", input, ExpForward{});
}

template <typename Loop>
Tensor exp_backward(const Tensor& grad_output, const Tensor& output) {
  return map_backward<Loop>("exp_backward", grad_output, "output", output, ExpBackward{});
}

}  // namespace ops
