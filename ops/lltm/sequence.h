// LLTM over a sequence: matrix products and steps, the same on any device. A Backend provides
// multiply, accumulate, run (a step), sum_rows and the operand dtype.
//
//   forward                                      backward
//   x [T·N, I] ──► products [T·N, 3S]            for t = T − 1 … 0:
//                  (one matrix product)            step: gradients of gates t, cell t − 1
//   for t = 0 … T − 1:                             grad_h = gates[t] · weights_h
//     products[t] += h · weights_hᵀ              grad of x, weights: products over all steps
//     step: gates ──► cell, h
#pragma once

#include "lltm/op.h"

namespace ops::lltm {

// Return a strided view of x as a matrix, from an offset (elements).
inline Tensor matrix(const Tensor& x, int64_t rows, int64_t columns, int64_t row_stride,
                     int64_t column_stride = 1, int64_t offset = 0) {
  const std::array<int64_t, 2> sizes{rows, columns}, strides{row_stride, column_stride};
  AtenTensorHandle view = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(x.get(), 2, sizes.data(), strides.data(), offset, &view));
  return Tensor(view);
}

// Return a view of rows [begin, end) of a contiguous matrix.
inline Tensor rows(const Tensor& x, int64_t begin, int64_t end, int64_t columns) {
  return matrix(x, end - begin, columns, columns, 1, begin * columns);
}
inline Tensor rows_transposed(const Tensor& x, int64_t begin, int64_t end, int64_t columns) {
  return matrix(x, columns, end - begin, 1, columns, begin * columns);
}

struct Outputs {
  Tensor output, last_cell, saved;
  std::optional<Tensor> last_h;  // sequence only
};

template <typename Backend>
Outputs forward(const Arguments& a) {
  const int64_t steps = a.sizes.steps, n = a.sizes.batch, in = a.sizes.input, s = a.sizes.state;
  const ScalarType dtype = a.input.scalar_type(), sum_dtype = accumulator_dtype(dtype);
  Outputs out{empty(a.input, a.result_shape(s)), empty(a.input, {n, s}),
              empty(a.input, a.result_shape(4 * s), sum_dtype), std::nullopt};
  if (a.names.is_sequence()) {
    out.last_h = empty(a.input, {n, s});
  }
  const Tensor x = Backend::operand(a.input), w = Backend::operand(a.weights);
  const Tensor weights_h = matrix(w, s, 3 * s, 1, s + in);
  Backend::multiply(matrix(out.saved, steps * n, 3 * s, 4 * s), rows(x, 0, steps * n, in),
                    matrix(w, in, 3 * s, 1, s + in, s));
  // Products of wider dtype are added by the step; h rounded to `dtype` is converted by it.
  const bool adds = x.scalar_type() != sum_dtype, converts = x.scalar_type() != dtype;
  const Tensor recurrent = empty_if(adds, out.saved, {n, 3 * s});
  const Tensor operand = empty_if(steps > 1 && converts, x, {n, s});
  Tensor h = Backend::operand(a.old_h);
  dispatch_floating(a.names.op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using O = typename Backend::template Operand<T>;
    for (int64_t t = 0; t < steps; ++t) {
      const Tensor products = matrix(out.saved, n, 3 * s, 4 * s, 1, t * n * 4 * s);
      const Tensor new_h = rows(out.output, t * n, (t + 1) * n, s);
      if (adds) {
        Backend::multiply(recurrent, h, weights_h);
      } else {
        Backend::accumulate(products, h, weights_h);
      }
      Forward<T, O> step{};
      step.saved = products.template mutable_data_ptr<A>();
      step.recurrent = data_unless_empty<A>(recurrent);
      step.bias = data_or_null<T>(a.bias);
      step.first_cell = t == 0 ? a.old_cell.template const_data_ptr<T>() : nullptr;
      step.before = t > 0 ? step.saved - n * 4 * s : nullptr;
      if (t == steps - 1) {
        step.last_cell = out.last_cell.template mutable_data_ptr<T>();
        step.last_h = out.last_h ? out.last_h->template mutable_data_ptr<T>() : nullptr;
      } else {
        step.operand = data_unless_empty<O>(operand);
      }
      step.new_h = new_h.template mutable_data_ptr<T>();
      Backend::run(a.input, a.sizes, step);
      h = converts ? operand : new_h;
    }
  });
  return out;
}

struct OutputGradients {  // absent ones are zero
  std::optional<Tensor> output, last_h, last_cell;
};

using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Return the gradients of input, weights, bias, old_h and old_cell that are in the mask; others
// have shape [0]. `output` is of a sequence.
template <typename Backend>
FiveTensors backward(const Names& names, OutputGradients grads, const Tensor& input,
                     const Tensor& weights, const std::optional<Tensor>& bias, const Tensor& old_h,
                     const Tensor& old_cell, std::optional<Tensor> output, const Tensor& saved,
                     const std::vector<bool>& mask) {
  const char* op = names.op;
  const Arguments a(names, input, weights, bias, old_h, old_cell);
  const int64_t steps = a.sizes.steps, n = a.sizes.batch, in = a.sizes.input, s = a.sizes.state;
  const int64_t columns = s + in, total = steps * n;
  const ScalarType dtype = a.input.scalar_type(), sum_dtype = accumulator_dtype(dtype);
  const auto prepare = [&](const char* name, std::optional<Tensor>& x,
                           const std::vector<int64_t>& expected) {
    if (x) {
      x = a.prepared(name, *x, expected);
    }
  };
  const std::vector<int64_t> all_h = a.result_shape(s), one{n, s};
  prepare(names.is_sequence() ? "grad_output" : "grad_h", grads.output, all_h);
  prepare("grad_h", grads.last_h, one);
  prepare("grad_cell", grads.last_cell, one);
  prepare("output", output, all_h);
  check_dtype(op, "saved", saved, sum_dtype);
  check_shape(op, "saved", saved, a.result_shape(4 * s));
  check_device(op, names.input, a.input, "saved", saved);
  check(mask.size() == 5, op, ": output_mask must be five booleans");
  const bool need_input = mask[0], need_weights = mask[1], need_bias = mask[2] && a.bias,
             need_h = mask[3], need_cell = mask[4];
  const bool need_gates = need_input || need_weights || need_bias || need_h || steps > 1;
  const Tensor steps_saved = as_contiguous(saved), w = Backend::operand(a.weights);

  // In the dtype of matrix operands; rounded to `dtype` on return.
  const Tensor grad_input =
      empty_if(need_input, w, {a.input.sizes().begin(), a.input.sizes().end()});
  const Tensor grad_weights = empty_if(need_weights, w, {3 * s, columns});
  const Tensor grad_old_h = empty_if(need_h, w, one),
               gates = empty_if(need_gates, w, {total, 3 * s});
  Tensor grad_bias = empty_if(need_bias, a.input, {3 * s});
  const Tensor grad_old_cell = empty_if(need_cell, a.input, one);
  const Tensor grad_h = empty_if(steps > 1, steps_saved, one),
               grad_cell = empty_if(steps > 1, steps_saved, one);

  dispatch_floating(op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using O = typename Backend::template Operand<T>;
    for (int64_t t = steps - 1; t >= 0; --t) {
      Backward<T, O> step{};
      step.saved = steps_saved.const_data_ptr<A>() + t * n * 4 * s;
      step.bias = data_or_null<T>(a.bias);
      if (grads.output) {
        step.grad_output = grads.output->template const_data_ptr<T>() + t * n * s;
      }
      if (need_gates) {
        step.grad_gates = gates.template mutable_data_ptr<O>() + t * n * 3 * s;
      }
      if (t == steps - 1) {
        step.grad_h.tensor = data_or_null<T>(grads.last_h);
        step.grad_cell.tensor = data_or_null<T>(grads.last_cell);
      } else {
        step.grad_h.carried = grad_h.template const_data_ptr<A>();
        step.grad_cell.carried = grad_cell.template const_data_ptr<A>();
      }
      if (t > 0) {
        step.grad_old_cell.carried = grad_cell.template mutable_data_ptr<A>();
      } else {
        step.grad_old_cell.tensor = data_unless_empty<T>(grad_old_cell);
      }
      Backend::run(a.input, a.sizes, step);
      if (t > 0 || need_h) {
        Backend::multiply(t > 0 ? grad_h : grad_old_h, rows(gates, t * n, (t + 1) * n, 3 * s),
                          matrix(w, 3 * s, s, columns));
      }
    }
    if (need_bias) {
      Backend::template sum_rows<T>(gates, total, 3 * s, grad_bias);
    }
  });
  if (need_input) {
    Backend::multiply(rows(grad_input, 0, total, in), gates, matrix(w, 3 * s, in, columns, 1, s));
  }
  if (need_weights) {  // gatesᵀ · [h, x], where h is old_h, then the outputs
    Backend::multiply(matrix(grad_weights, 3 * s, in, columns, 1, s),
                      rows_transposed(gates, 0, total, 3 * s),
                      rows(Backend::operand(a.input), 0, total, in));
    const Tensor by_h = matrix(grad_weights, 3 * s, s, columns);
    Backend::multiply(by_h, rows_transposed(gates, 0, n, 3 * s), Backend::operand(a.old_h));
    if (steps > 1) {
      Backend::accumulate(by_h, rows_transposed(gates, n, total, 3 * s),
                          rows(Backend::operand(*output), 0, total - n, s));
    }
  }
  return {to_dtype(grad_input, dtype), in_strides_of(weights, to_dtype(grad_weights, dtype)),
          bias ? in_strides_of(*bias, grad_bias) : grad_bias,
          in_strides_of(old_h, to_dtype(grad_old_h, dtype)),
          in_strides_of(old_cell, grad_old_cell)};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> cell(const Tensor& input, const Tensor& weights,
                                        std::optional<Tensor> bias, const Tensor& old_h,
                                        const Tensor& old_cell) {
  const Outputs out =
      forward<Backend>({cell_names("lltm_cell"), input, weights, bias, old_h, old_cell});
  return {out.output, out.last_cell, out.saved};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> sequence(const Tensor& sequence, const Tensor& weights,
                                                    std::optional<Tensor> bias, const Tensor& h0,
                                                    const Tensor& c0) {
  const Outputs out = forward<Backend>({sequence_names("lltm"), sequence, weights, bias, h0, c0});
  return {out.output, *out.last_h, out.last_cell, out.saved};
}

template <typename Backend>
FiveTensors cell_backward(std::optional<Tensor> grad_h, std::optional<Tensor> grad_cell,
                          const Tensor& input, const Tensor& weights, std::optional<Tensor> bias,
                          const Tensor& old_h, const Tensor& old_cell, const Tensor& saved,
                          std::vector<bool> output_mask) {
  return backward<Backend>(cell_names("lltm_cell_backward"), {grad_h, std::nullopt, grad_cell},
                           input, weights, bias, old_h, old_cell, std::nullopt, saved, output_mask);
}

template <typename Backend>
FiveTensors sequence_backward(std::optional<Tensor> grad_output, std::optional<Tensor> grad_h,
                              std::optional<Tensor> grad_cell, const Tensor& sequence,
                              const Tensor& weights, std::optional<Tensor> bias, const Tensor& h0,
                              const Tensor& c0, const Tensor& output, const Tensor& saved,
                              std::vector<bool> output_mask) {
  return backward<Backend>(sequence_names("lltm_backward"), {grad_output, grad_h, grad_cell},
                           sequence, weights, bias, h0, c0, output, saved, output_mask);
}

}  // namespace ops::lltm
