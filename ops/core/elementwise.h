// Device-independent part of elementwise operators: checks, allocation, dtype dispatch.
#pragma once

#include <cmath>

#include "core/layout.h"

namespace ops {

// A formula is a functor over T: double, float, a vector of them on the CPU (core/cpu/simd.h), and
// FastFloat for 16-bit tensors on CUDA. All have +, -, *, /, <, >, exp, and the functions below.

// Return e^(F x) for a std::ratio F. Vectors have overloads.
template <typename F, typename T>
OPS_FORMULA T exp_of_multiple(T x) {
  using std::exp;
  return exp(T(static_cast<double>(F::num) / F::den) * x);
}

template <typename T>
OPS_FORMULA T select(bool condition, T a, T b) {
  return condition ? a : b;
}

// The elementwise operators of a device. Loop::run is its loop over dense memory.
template <typename Loop>
struct Elementwise {
  // Return F(input) with the layout of `input`. F::op is the operator's name.
  template <typename F>
  static Tensor forward(const Tensor& input) {
    const Tensor x = dense(input);
    return map<F>(x, x);
  }

  // Return F(grad_output, saved) with the layout of `saved` (F::saved in messages).
  template <typename F>
  static Tensor backward(const Tensor& grad_output, const Tensor& saved) {
    check_shape(F::op, "grad_output", grad_output, {saved.sizes().begin(), saved.sizes().end()});
    check_same(F::op, F::saved, saved, "grad_output", grad_output);
    const Tensor x = dense(saved);
    return map<F>(x, with_layout_of(grad_output, x), x);
  }

 private:
  // Return F(in...) with the layout of x; all tensors are dense, with this layout.
  template <typename F, typename... In>
  static Tensor map(const Tensor& x, const In&... in) {
    Tensor out = empty_as(x);
    dispatch_floating(F::op, x.scalar_type(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      Loop::run(x, out.mutable_data_ptr<T>(), F{}, in.template const_data_ptr<T>()...);
    });
    return out;
  }
};

}  // namespace ops
