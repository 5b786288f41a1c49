// exp: formulas on any device.
#pragma once

#include "core/elementwise.h"

namespace ops::exp {

struct Forward {
  static constexpr const char* op = "exp";

  template <typename T>
  OPS_FORMULA T operator()(T x) const {
    using std::exp;
    return exp(x);
  }
};

// exp' = exp: the derivative is the output.
struct Backward {
  static constexpr const char *op = "exp_backward", *saved = "output";

  template <typename T>
  OPS_FORMULA T operator()(T grad_output, T output) const {
    return grad_output * output;
  }
};

}  // namespace ops::exp
