// LLTM: parameters of a step on any device, and the checked arguments of the operators. A cell is a
// sequence of one step. Gates are in the order input, output, candidate:
//
//   products = [h, x] · weightsᵀ, gates = products + bias            [N, 3S]
//   cell'    = cell + elu(candidate) · σ(input)                      [N, S]
//   h'       = tanh(cell') · σ(output)
//
// Forward saves products and cell' for backward, [N, 4S] for each step.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include "core/layout.h"

namespace ops::lltm {

struct Sizes {
  int64_t steps, batch, input, state;
};

// A feature of a row of the batch.
struct Position {
  int64_t state, row, column;

  OPS_DEVICE int64_t state_offset() const { return row * state + column; }
  OPS_DEVICE int64_t gate(int i) const { return (3 * row + i) * state + column; }
  OPS_DEVICE int64_t saved(int i) const { return (4 * row + i) * state + column; }
};

// Input or output state of a step: `tensor` at the ends of a sequence, `carried` between steps; if
// both are null, zeros are read and nothing is written.
template <typename T>
struct StateInput {
  const T* tensor = nullptr;
  const acc_t<T>* carried = nullptr;
};
template <typename T>
struct StateOutput {
  T* tensor = nullptr;
  acc_t<T>* carried = nullptr;
};

// Forward step. Contiguous: states [N, S], saved [N, 4S], bias [3S]. O: dtype of operands.
template <typename T, typename O>
struct Forward {
  using A = acc_t<T>;

  A* saved;             // products of the gates, without bias; receives the new cell
  const A* recurrent;   // [N, 3S], to be added to the products; or null
  const T* bias;        // or null
  const T* first_cell;  // old cell of the first step, or null
  const A* before;      // `saved` of the step before: its cell
  T* last_cell;         // copies of new cell and h, or null
  T* last_h;
  T* new_h;
  O* operand;  // new_h as operand of the next matrix product, or null
};

// Backward step.
template <typename T, typename O>
struct Backward {
  using A = acc_t<T>;

  const A* saved;
  const T* bias;
  const T* grad_output;     // of new_h, or null
  StateInput<T> grad_h;     // added to grad_output
  StateInput<T> grad_cell;  // of new_cell
  O* grad_gates;            // or null
  StateOutput<T> grad_old_cell;
};

// Names of the operator and its arguments in error messages, and the dimensions of the input.
struct Names {
  const char *op, *input, *old_h, *old_cell, *shape;
  int64_t dim;

  bool is_sequence() const { return dim == 3; }
};

constexpr Names cell_names(const char* op) {
  return {op, "input", "old_h", "old_cell", "[N, I]", 2};
}
constexpr Names sequence_names(const char* op) {
  return {op, "sequence", "h0", "c0", "[T, N, I]", 3};
}

// Check the arguments and make them contiguous.
struct Arguments {
  Names names;
  Sizes sizes;
  Tensor input, weights, old_h, old_cell;
  std::optional<Tensor> bias;

  Arguments(const Names& names, const Tensor& input, const Tensor& weights,
            const std::optional<Tensor>& bias, const Tensor& old_h, const Tensor& old_cell)
      : names(names), input(input), weights(weights), old_h(old_h), old_cell(old_cell), bias(bias) {
    const char* op = names.op;
    dispatch_floating(op, input.scalar_type(), [](auto) {});
    check(input.dim() == names.dim, op, ": ", names.input, " must have shape ", names.shape,
          ", got ", shape{input});
    check(old_h.dim() == 2, op, ": ", names.old_h, " must have shape [N, S], got ", shape{old_h});
    const int64_t steps = names.is_sequence() ? input.size(0) : 1, s = old_h.size(1);
    sizes = {steps, input.size(names.dim - 2), input.size(names.dim - 1), s};
    check(steps > 0, op, ": ", names.input, " must have at least one step, got ", shape{input});
    this->input = as_contiguous(input);
    this->old_h = prepared(names.old_h, old_h, {sizes.batch, s});
    this->old_cell = prepared(names.old_cell, old_cell, {sizes.batch, s});
    this->weights = prepared("weights", weights, {3 * s, s + sizes.input});
    if (bias) {
      this->bias = prepared("bias", *bias, {3 * s});
    }
  }

  // Check a tensor and make it contiguous.
  Tensor prepared(const char* name, const Tensor& x, const std::vector<int64_t>& expected) const {
    check_same(names.op, names.input, input, name, x);
    check_shape(names.op, name, x, expected);
    return as_contiguous(x);
  }

  // Return the shape of a result: [T, N, columns], or [N, columns] for a cell.
  std::vector<int64_t> result_shape(int64_t columns) const {
    return names.is_sequence() ? std::vector{sizes.steps, sizes.batch, columns}
                               : std::vector{sizes.batch, columns};
  }
};

}  // namespace ops::lltm
