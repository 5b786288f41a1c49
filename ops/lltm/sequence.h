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

// Return the outputs of all steps, h and cell of the last one, and the values saved for backward.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& sequence, const Tensor& weights,
                                                   std::optional<Tensor> bias, const Tensor& h0,
                                                   const Tensor& c0) {
  const Arguments a("lltm", sequence, weights, bias, h0, c0);
  const int64_t steps = a.sizes.steps, n = a.sizes.batch, in = a.sizes.input, s = a.sizes.state;
  const ScalarType dtype = sequence.scalar_type(), sum_dtype = accumulator_dtype(dtype);
  const Tensor output = empty(sequence, {steps, n, s}), last_h = empty(sequence, {n, s}),
               last_cell = empty(sequence, {n, s}),
               saved = empty(sequence, {steps, n, 4 * s}, sum_dtype);
  const Tensor x = Backend::operand(a.sequence), w = Backend::operand(a.weights);
  const Tensor weights_h = matrix(w, s, 3 * s, 1, s + in);
  Backend::multiply(matrix(saved, steps * n, 3 * s, 4 * s), rows(x, 0, steps * n, in),
                    matrix(w, in, 3 * s, 1, s + in, s));
  // Products of wider dtype are added by the step; h rounded to `dtype` is converted by it.
  const bool adds = x.scalar_type() != sum_dtype, converts = x.scalar_type() != dtype;
  const Tensor recurrent = empty_if(adds, saved, {n, 3 * s});
  const Tensor operand = empty_if(steps > 1 && converts, x, {n, s});
  Tensor h = Backend::operand(a.h0);
  dispatch_floating("lltm", dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using O = typename Backend::template Operand<T>;
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t offset = t * n * 4 * s;
      if (adds) {
        Backend::multiply(recurrent, h, weights_h);
      } else {
        Backend::accumulate(matrix(saved, n, 3 * s, 4 * s, 1, offset), h, weights_h);
      }
      Forward<T, O> step{};
      step.saved = saved.template mutable_data_ptr<A>() + offset;
      step.recurrent = data_unless_empty<A>(recurrent);
      step.bias = data_or_null<T>(a.bias);
      step.first_cell = t == 0 ? a.c0.template const_data_ptr<T>() : nullptr;
      step.before = t > 0 ? step.saved - n * 4 * s : nullptr;
      if (t == steps - 1) {
        step.last_cell = last_cell.template mutable_data_ptr<T>();
        step.last_h = last_h.template mutable_data_ptr<T>();
      } else {
        step.operand = data_unless_empty<O>(operand);
      }
      step.new_h = output.template mutable_data_ptr<T>() + t * n * s;
      Backend::run(sequence, a.sizes, step);
      if (t < steps - 1) {
        h = converts ? operand : rows(output, t * n, (t + 1) * n, s);
      }
    }
  });
  return {output, last_h, last_cell, saved};
}

// Return the gradients of sequence, weights, bias, h0 and c0 that are in the mask; others have
// shape [0]. Absent gradients of outputs are zero.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    std::optional<Tensor> grad_output, std::optional<Tensor> grad_h,
    std::optional<Tensor> grad_cell, const Tensor& sequence, const Tensor& weights,
    std::optional<Tensor> bias, const Tensor& h0, const Tensor& c0, const Tensor& output,
    const Tensor& saved, std::vector<bool> mask) {
  const char* op = "lltm_backward";
  const Arguments a(op, sequence, weights, bias, h0, c0);
  const int64_t steps = a.sizes.steps, n = a.sizes.batch, in = a.sizes.input, s = a.sizes.state;
  const int64_t columns = s + in, total = steps * n;
  const ScalarType dtype = sequence.scalar_type(), sum_dtype = accumulator_dtype(dtype);
  const std::vector<int64_t> all_h{steps, n, s}, one{n, s};
  grad_output = a.prepared("grad_output", grad_output, all_h);
  grad_h = in_dtype(a.prepared("grad_h", grad_h, one), sum_dtype);
  grad_cell = in_dtype(a.prepared("grad_cell", grad_cell, one), sum_dtype);
  const Tensor all_outputs = a.prepared("output", output, all_h);
  check_dtype(op, "saved", saved, sum_dtype);
  check_shape(op, "saved", saved, {steps, n, 4 * s});
  check_device(op, "sequence", sequence, "saved", saved);
  check(mask.size() == 5, op, ": output_mask must be five booleans");
  const bool need_input = mask[0], need_weights = mask[1], need_bias = mask[2] && a.bias,
             need_h = mask[3], need_cell = mask[4];
  const bool need_gates = need_input || need_weights || need_bias || need_h || steps > 1;
  const Tensor values = as_contiguous(saved), w = Backend::operand(a.weights);

  // In the dtype of matrix operands; rounded to `dtype` on return.
  const Tensor grad_sequence = empty_if(need_input, w, {steps, n, in});
  const Tensor grad_weights = empty_if(need_weights, w, {3 * s, columns});
  const Tensor grad_h0 = empty_if(need_h, w, one), gates = empty_if(need_gates, w, {total, 3 * s});
  Tensor grad_bias = empty_if(need_bias, sequence, {3 * s});
  const Tensor grad_c0 = empty_if(need_cell, values, one);
  const Tensor carried_h = empty_if(steps > 1, values, one),
               carried_cell = empty_if(steps > 1, values, one);

  dispatch_floating(op, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = acc_t<T>;
    using O = typename Backend::template Operand<T>;
    for (int64_t t = steps - 1; t >= 0; --t) {
      Backward<T, O> step{};
      step.saved = values.const_data_ptr<A>() + t * n * 4 * s;
      step.bias = data_or_null<T>(a.bias);
      if (grad_output) {
        step.grad_output = grad_output->template const_data_ptr<T>() + t * n * s;
      }
      if (need_gates) {
        step.grad_gates = gates.template mutable_data_ptr<O>() + t * n * 3 * s;
      }
      step.grad_h = data_or_null<A>(t == steps - 1 ? grad_h : carried_h);
      step.grad_cell = data_or_null<A>(t == steps - 1 ? grad_cell : carried_cell);
      step.grad_old_cell = data_unless_empty<A>(t > 0 ? carried_cell : grad_c0);
      Backend::run(sequence, a.sizes, step);
      if (t > 0 || need_h) {
        Backend::multiply(t > 0 ? carried_h : grad_h0, rows(gates, t * n, (t + 1) * n, 3 * s),
                          matrix(w, 3 * s, s, columns));
      }
    }
    if (need_bias) {
      Backend::template sum_rows<T>(gates, total, 3 * s, grad_bias);
    }
  });
  if (need_input) {
    Backend::multiply(rows(grad_sequence, 0, total, in), gates,
                      matrix(w, 3 * s, in, columns, 1, s));
  }
  if (need_weights) {  // gatesᵀ · [h, x], where h is h0, then the outputs
    Backend::multiply(matrix(grad_weights, 3 * s, in, columns, 1, s),
                      rows_transposed(gates, 0, total, 3 * s),
                      rows(Backend::operand(a.sequence), 0, total, in));
    const Tensor by_h = matrix(grad_weights, 3 * s, s, columns);
    Backend::multiply(by_h, rows_transposed(gates, 0, n, 3 * s), Backend::operand(a.h0));
    if (steps > 1) {
      Backend::accumulate(by_h, rows_transposed(gates, n, total, 3 * s),
                          rows(Backend::operand(all_outputs), 0, total - n, s));
    }
  }
  return {to_dtype(grad_sequence, dtype), in_strides_of(weights, to_dtype(grad_weights, dtype)),
          bias ? in_strides_of(*bias, grad_bias) : grad_bias,
          in_strides_of(h0, to_dtype(grad_h0, dtype)), in_strides_of(c0, to_dtype(grad_c0, dtype))};
}

}  // namespace ops::lltm
