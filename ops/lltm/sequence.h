// LLTM over a sequence: matrix products and steps, the same on any device. A Backend provides
// multiply, accumulate, run (a step or a scan), sum_rows and the operand dtype.
//
//   forward                                      backward
//   x [T·N, I] ──► products [T·N, 3S]            scan: cells of all steps, elementwise
//                  (one matrix product)          for t = T − 1 … 0:
//   for t = 0 … T − 1:                             step: gradients of gates t, cell t − 1
//     products[t] += h · weights_hᵀ                grad_h = gates[t] · weights_h
//     step: gates ──► cell, h                    grad of x, weights: products over all steps
#pragma once

#include "lltm/op.h"

namespace ops {

template <typename Backend>
LltmOutputs lltm_forward(const LltmNames& names, const Tensor& input, const Tensor& weights,
                         const std::optional<Tensor>& bias, const Tensor& old_h,
                         const Tensor& old_cell) {
  const LltmArguments a(names, input, weights, bias, old_h, old_cell);
  const int64_t steps = a.sizes.steps, n = a.sizes.batch, in = a.sizes.input, s = a.sizes.state;
  const int64_t weight_cols = s + in;
  LltmOutputs out;
  out.output = empty(a.input, a.result_shape(s));
  out.last_cell = empty(a.input, {n, s});
  if (names.is_sequence()) {
    out.last_h = empty(a.input, {n, s});
  }
  const ScalarType sum_dtype = accumulator_dtype(a.input.scalar_type());
  out.products = empty(a.input, a.result_shape(3 * s), sum_dtype);
  dispatch_floating(names.op, a.input.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using O = typename Backend::template Operand<T>;
    const Tensor x = Backend::operand(a.input), w = Backend::operand(a.weights);
    const Tensor weights_h = matrix(w, s, 3 * s, 1, weight_cols);
    Backend::multiply(rows(out.products, 0, steps * n, 3 * s), rows(x, 0, steps * n, in),
                      matrix(w, in, 3 * s, 1, weight_cols, s));
    std::optional<Tensor> carried, recurrent, operand;
    if (steps > 1) {
      carried = empty(a.input, {n, s}, sum_dtype);
      if (!std::is_same_v<T, O>) {
        operand = empty(x, {n, s});
      }
    }
    if (!std::is_same_v<A, O>) {
      recurrent = empty(a.input, {n, 3 * s}, sum_dtype);
    }
    Tensor h = Backend::operand(a.old_h);
    for (int64_t t = 0; t < steps; ++t) {
      const bool last = t == steps - 1;
      const Tensor products = rows(out.products, t * n, (t + 1) * n, 3 * s);
      const Tensor new_h = rows(out.output, t * n, (t + 1) * n, s);
      if (recurrent) {
        Backend::multiply(*recurrent, h, weights_h);
      } else {
        Backend::accumulate(products, h, weights_h);
      }
      LltmForward<T, O> step{};
      step.products = products.template const_data_ptr<A>();
      if (recurrent) {
        step.recurrent = recurrent->template const_data_ptr<A>();
        step.sums_out = products.template mutable_data_ptr<A>();
      }
      step.bias = data_or_null<T>(a.bias);
      if (t == 0) {
        step.old_cell.tensor = a.old_cell.template const_data_ptr<T>();
      } else {
        step.old_cell.carried = carried->template const_data_ptr<A>();
      }
      if (last) {
        step.new_cell.tensor = out.last_cell.template mutable_data_ptr<T>();
        step.last_h = out.last_h ? out.last_h->template mutable_data_ptr<T>() : nullptr;
      } else {
        step.new_cell.carried = carried->template mutable_data_ptr<A>();
        step.operand = operand ? operand->template mutable_data_ptr<O>() : nullptr;
      }
      step.new_h = new_h.template mutable_data_ptr<T>();
      Backend::run(a.input, a.sizes, step);
      h = operand ? *operand : new_h;
    }
  });
  return out;
}

using LltmMask = std::vector<bool>;  // input, weights, bias, old_h, old_cell

// Return the gradients in the mask; others have shape [0].
template <typename Backend>
FiveTensors lltm_backward(const LltmNames& names, LltmGradients grads, const Tensor& input,
                          const Tensor& weights, const std::optional<Tensor>& bias,
                          const Tensor& old_h, const Tensor& old_cell, std::optional<Tensor> output,
                          const Tensor& products, const LltmMask& mask) {
  const char* op = names.op;
  const LltmArguments a(names, input, weights, bias, old_h, old_cell);
  const int64_t steps = a.sizes.steps, n = a.sizes.batch, in = a.sizes.input, s = a.sizes.state;
  const int64_t weight_cols = s + in, total = steps * n;
  const ScalarType dtype = a.input.scalar_type(), sum_dtype = accumulator_dtype(dtype);
  const auto prepare = [&](const char* name, std::optional<Tensor>& x,
                           const std::vector<int64_t>& expected) {
    if (x) {
      check_same(op, names.input, a.input, name, *x);
      check_shape(op, name, *x, expected);
      x = as_contiguous(*x);
    }
  };
  prepare(names.is_sequence() ? "grad_output" : "grad_h", grads.output, a.result_shape(s));
  prepare("grad_h", grads.last_h, {n, s});
  prepare("grad_cell", grads.last_cell, {n, s});
  prepare("output", output, a.result_shape(s));
  check_dtype(op, "products", products, sum_dtype);
  check_shape(op, "products", products, a.result_shape(3 * s));
  check_device(op, names.input, a.input, "products", products);
  check(mask.size() == 5, op, ": output_mask must be five booleans");
  const bool need_input = mask[0], need_weights = mask[1], need_bias = mask[2] && a.bias,
             need_h = mask[3], need_cell = mask[4];
  const Tensor p = as_contiguous(products);

  const Tensor w = Backend::operand(a.weights);
  // In the dtype of matrix operands; rounded to `dtype` on return.
  Tensor grad_input = empty_if(need_input, w, {a.input.sizes().begin(), a.input.sizes().end()});
  Tensor grad_weights = empty_if(need_weights, w, {3 * s, weight_cols});
  Tensor grad_old_h = empty_if(need_h, w, {n, s});
  Tensor grad_bias = empty_if(need_bias, a.input, {3 * s});
  Tensor grad_old_cell = empty_if(need_cell, a.input, {n, s});

  dispatch_floating(op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using O = typename Backend::template Operand<T>;
    const Tensor weights_h = matrix(w, 3 * s, s, weight_cols);
    const bool need_gates = need_input || need_weights || need_bias || need_h || steps > 1;
    const Tensor gates = empty_if(need_gates, w, {total, 3 * s});
    std::optional<Tensor> cells, grad_h, grad_cell;
    if (steps > 1) {
      cells = empty(a.input, {steps - 1, n, s}, sum_dtype);
      grad_h = empty(a.input, {n, s}, sum_dtype);
      grad_cell = empty(a.input, {n, s}, sum_dtype);
      Backend::run(a.input, a.sizes,
                   LltmScan<T>{p.const_data_ptr<A>(), data_or_null<T>(a.bias),
                               a.old_cell.template const_data_ptr<T>(),
                               cells->template mutable_data_ptr<A>()});
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
      const bool last = t == steps - 1;
      LltmBackward<T, O> step{};
      step.products = p.const_data_ptr<A>() + t * n * 3 * s;
      step.bias = data_or_null<T>(a.bias);
      if (t == 0) {
        step.old_cell.tensor = a.old_cell.template const_data_ptr<T>();
      } else {
        step.old_cell.carried = cells->template const_data_ptr<A>() + (t - 1) * n * s;
      }
      step.grad_output =
          grads.output ? grads.output->template const_data_ptr<T>() + t * n * s : nullptr;
      if (last) {
        step.grad_h.tensor = data_or_null<T>(grads.last_h);
        step.grad_cell.tensor = data_or_null<T>(grads.last_cell);
      } else {
        step.grad_h.carried = grad_h->template const_data_ptr<A>();
        step.grad_cell.carried = grad_cell->template const_data_ptr<A>();
      }
      step.grad_gates = need_gates ? gates.template mutable_data_ptr<O>() + t * n * 3 * s : nullptr;
      if (t > 0) {
        step.grad_old_cell.carried = grad_cell->template mutable_data_ptr<A>();
      } else if (need_cell) {
        step.grad_old_cell.tensor = grad_old_cell.template mutable_data_ptr<T>();
      }
      Backend::run(a.input, a.sizes, step);
      if (t > 0 || need_h) {
        Backend::multiply(t > 0 ? *grad_h : grad_old_h, rows(gates, t * n, (t + 1) * n, 3 * s),
                          weights_h);
      }
    }
    if (need_input) {
      Backend::multiply(rows(grad_input, 0, total, in), rows(gates, 0, total, 3 * s),
                        matrix(w, 3 * s, in, weight_cols, 1, s));
    }
    if (need_weights) {  // gatesᵀ · [h, x], where h is old_h, then the outputs
      Backend::multiply(matrix(grad_weights, 3 * s, in, weight_cols, 1, s),
                        rows_transposed(gates, 0, total, 3 * s),
                        rows(Backend::operand(a.input), 0, total, in));
      const Tensor by_h = matrix(grad_weights, 3 * s, s, weight_cols);
      Backend::multiply(by_h, rows_transposed(gates, 0, n, 3 * s), Backend::operand(a.old_h));
      if (steps > 1) {
        Backend::accumulate(by_h, rows_transposed(gates, n, total, 3 * s),
                            rows(Backend::operand(*output), 0, total - n, s));
      }
    }
    if (need_bias) {
      Backend::template sum_rows<T>(gates, total, 3 * s, grad_bias);
    }
  });
  return {to_dtype(grad_input, dtype), in_strides_of(weights, to_dtype(grad_weights, dtype)),
          bias ? in_strides_of(*bias, grad_bias) : grad_bias,
          in_strides_of(old_h, to_dtype(grad_old_h, dtype)),
          in_strides_of(old_cell, grad_old_cell)};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> lltm_cell(const Tensor& input, const Tensor& weights,
                                             std::optional<Tensor> bias, const Tensor& old_h,
                                             const Tensor& old_cell) {
  LltmOutputs out =
      lltm_forward<Backend>(cell_names("lltm_cell"), input, weights, bias, old_h, old_cell);
  return {out.output, out.last_cell, out.products};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> lltm(const Tensor& sequence, const Tensor& weights,
                                                std::optional<Tensor> bias, const Tensor& h0,
                                                const Tensor& c0) {
  LltmOutputs out = lltm_forward<Backend>(sequence_names("lltm"), sequence, weights, bias, h0, c0);
  return {out.output, *out.last_h, out.last_cell, out.products};
}

template <typename Backend>
FiveTensors lltm_cell_backward(std::optional<Tensor> grad_h, std::optional<Tensor> grad_cell,
                               const Tensor& input, const Tensor& weights,
                               std::optional<Tensor> bias, const Tensor& old_h,
                               const Tensor& old_cell, const Tensor& products,
                               std::vector<bool> output_mask) {
  return lltm_backward<Backend>(cell_names("lltm_cell_backward"), {grad_h, std::nullopt, grad_cell},
                                input, weights, bias, old_h, old_cell, std::nullopt, products,
                                output_mask);
}

template <typename Backend>
FiveTensors lltm_sequence_backward(std::optional<Tensor> grad_output, std::optional<Tensor> grad_h,
                                   std::optional<Tensor> grad_cell, const Tensor& sequence,
                                   const Tensor& weights, std::optional<Tensor> bias,
                                   const Tensor& h0, const Tensor& c0, const Tensor& output,
                                   const Tensor& products, std::vector<bool> output_mask) {
  return lltm_backward<Backend>(sequence_names("lltm_backward"), {grad_output, grad_h, grad_cell},
                                sequence, weights, bias, h0, c0, output, products, output_mask);
}

}  // namespace ops
