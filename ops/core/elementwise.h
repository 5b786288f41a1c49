// Device-independent part of elementwise operators: checks, allocation, dtype dispatch.
#pragma once

#include "core/layout.h"

namespace ops {

// Return f(in...) with the layout of x; all tensors are dense, with this layout. Loop::run is the
// device's loop over dense memory.
template <typename Loop, typename F, typename... In>
Tensor map_dense(const char* op, const F& f, const Tensor& x, const In&... in) {
  Tensor out = empty_as(x);
  dispatch_floating(op, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Loop::run(x, out.mutable_data_ptr<T>(), f, in.template const_data_ptr<T>()...);
  });
  return out;
}

// Return f(input) with the layout of `input`.
template <typename Loop, typename F>
Tensor map(const char* op, const Tensor& input, const F& f) {
  const Tensor x = dense(input);
  return map_dense<Loop>(op, f, x, x);
}

// Return grad_input = f(grad_output, saved) with the layout of `saved`.
template <typename Loop, typename F>
Tensor map_backward(const char* op, const Tensor& grad_output, const char* saved_name,
                    const Tensor& saved, const F& f) {
  check_shape(op, "grad_output", grad_output, {saved.sizes().begin(), saved.sizes().end()});
  check_same(op, saved_name, saved, "grad_output", grad_output);
  const Tensor x = dense(saved);
  return map_dense<Loop>(op, f, x, with_layout_of(grad_output, x), x);
}

}  // namespace ops
