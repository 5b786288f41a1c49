// LLTM: parameters of a step on any device, and the checked arguments of the operators. A cell is a
// sequence of one step. Gates are in the order input, output, candidate:
//
//   products = [h, x] · weightsᵀ, gates = products + bias            [N, 3S]
//   cell'    = cell + elu(candidate) · σ(input)                      [N, S]
//   h'       = tanh(cell') · σ(output)
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "core/layout.h"

namespace ops {

struct LltmSizes {
  int64_t steps, batch, input, state;
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

// Forward step. Contiguous: states [N, S], products [N, 3S], bias [3S]. O: dtype of operands.
template <typename T, typename O>
struct LltmForward {
  using A = acc_t<T>;

  const A* products;   // of the gates, without bias
  const A* recurrent;  // h · weights_hᵀ, to be added to products; or null
  A* sums_out;         // receives products + recurrent
  const T* bias;       // or null
  StateInput<T> old_cell;
  StateOutput<T> new_cell;
  T* new_h;
  T* last_h;   // copy of new_h, or null
  O* operand;  // new_h as operand of the next matrix product, or null
};

// Backward step.
template <typename T, typename O>
struct LltmBackward {
  using A = acc_t<T>;

  const A* products;
  const T* bias;
  StateInput<T> old_cell;
  const T* grad_output;     // of new_h, or null
  StateInput<T> grad_h;     // added to grad_output
  StateInput<T> grad_cell;  // of new_cell
  O* grad_gates;            // or null
  StateOutput<T> grad_old_cell;
};

// Recompute cells[t] = cells[t − 1] + elu(candidate) · σ(input) for all steps but the last.
template <typename T>
struct LltmScan {
  using A = acc_t<T>;

  const A* products;
  const T* bias;
  const T* first_cell;
  A* cells;
};

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

// Names of the operator and its arguments in error messages, and the dimensions of the input.
struct LltmNames {
  const char *op, *input, *old_h, *old_cell, *shape;
  int64_t dim;

  bool is_sequence() const { return dim == 3; }
};

constexpr LltmNames cell_names(const char* op) {
  return {op, "input", "old_h", "old_cell", "[N, I]", 2};
}
constexpr LltmNames sequence_names(const char* op) {
  return {op, "sequence", "h0", "c0", "[T, N, I]", 3};
}

struct LltmOutputs {
  Tensor output, last_cell, products;
  std::optional<Tensor> last_h;  // sequence only
};

struct LltmGradients {  // of the outputs; absent ones are zero
  std::optional<Tensor> output, last_h, last_cell;
};

using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Check the arguments and make them contiguous.
struct LltmArguments {
  LltmSizes sizes;
  Tensor input, weights, old_h, old_cell;
  std::optional<Tensor> bias;

  LltmArguments(const LltmNames& names, const Tensor& input_, const Tensor& weights_,
                const std::optional<Tensor>& bias_, const Tensor& old_h_, const Tensor& old_cell_)
      : input(input_), weights(weights_), old_h(old_h_), old_cell(old_cell_), bias(bias_) {
    const char* op = names.op;
    const int64_t dim = names.dim;
    dispatch_floating(op, input.scalar_type(), [](auto) {});
    check(input.dim() == dim, op, ": ", names.input, " must have shape ", names.shape, ", got ",
          shape{input});
    check(old_h.dim() == 2, op, ": ", names.old_h, " must have shape [N, S], got ", shape{old_h});
    sizes = {names.is_sequence() ? input.size(0) : 1, input.size(dim - 2), input.size(dim - 1),
             old_h.size(1)};
    check(sizes.steps > 0, op, ": ", names.input, " must have at least one step, got ",
          shape{input});
    const auto like_input = [&](const char* name, const Tensor& x, std::vector<int64_t> expected) {
      check_same(op, names.input, input, name, x);
      check_shape(op, name, x, expected);
    };
    const int64_t n = sizes.batch, s = sizes.state;
    like_input(names.old_h, old_h, {n, s});
    like_input(names.old_cell, old_cell, {n, s});
    like_input("weights", weights, {3 * s, s + sizes.input});
    if (bias) {
      like_input("bias", *bias, {3 * s});
      bias = as_contiguous(*bias);
    }
    input = as_contiguous(input);
    weights = as_contiguous(weights);
    old_h = as_contiguous(old_h);
    old_cell = as_contiguous(old_cell);
  }

  // Return the shape of a result: [T, N, columns], or [N, columns] for a cell.
  std::vector<int64_t> result_shape(int64_t columns) const {
    return input.dim() == 3 ? std::vector{sizes.steps, sizes.batch, columns}
                            : std::vector{sizes.batch, columns};
  }
};

}  // namespace ops
