// LLTM: parameters of a step on any device, and the checked arguments of the operators. Gates are
// in the order input, output, candidate:
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
  const T* grad_output;  // of new_h, or null
  const A* grad_h;       // added to grad_output; or null
  const A* grad_cell;    // of the new cell, or null
  O* grad_gates;         // or null
  A* grad_old_cell;      // or null
};

// Check the arguments and make them contiguous.
struct Arguments {
  const char* op;
  Sizes sizes;
  Tensor sequence, weights, h0, c0;
  std::optional<Tensor> bias;

  Arguments(const char* op, const Tensor& sequence, const Tensor& weights,
            const std::optional<Tensor>& bias, const Tensor& h0, const Tensor& c0)
      : op(op), sequence(sequence), weights(weights), h0(h0), c0(c0) {
    dispatch_floating(op, sequence.scalar_type(), [](auto) {});
    check(sequence.dim() == 3, op, ": sequence must have shape [T, N, I], got ", shape{sequence});
    check(h0.dim() == 2, op, ": h0 must have shape [N, S], got ", shape{h0});
    const int64_t s = h0.size(1);
    sizes = {sequence.size(0), sequence.size(1), sequence.size(2), s};
    check(sizes.steps > 0, op, ": sequence must have at least one step, got ", shape{sequence});
    this->sequence = as_contiguous(sequence);
    this->h0 = prepared("h0", h0, {sizes.batch, s});
    this->c0 = prepared("c0", c0, {sizes.batch, s});
    this->weights = prepared("weights", weights, {3 * s, s + sizes.input});
    this->bias = prepared("bias", bias, {3 * s});
  }

  // Check a tensor and make it contiguous.
  Tensor prepared(const char* name, const Tensor& x, const std::vector<int64_t>& expected) const {
    check_same(op, "sequence", sequence, name, x);
    check_shape(op, name, x, expected);
    return as_contiguous(x);
  }
  std::optional<Tensor> prepared(const char* name, const std::optional<Tensor>& x,
                                 const std::vector<int64_t>& expected) const {
    return x ? std::optional(prepared(name, *x, expected)) : std::nullopt;
  }
};

}  // namespace ops::lltm
