// Elementwise step of the LLTM after the matrix products: forward, backward, scan over all steps.
//
//   products [N, 3S]: a row                                   state [N, S]
//   ┌─────────┬─────────┬─────────┐   bias, σ, elu, tanh      ┌─────────┐
//   │ input   │ output  │candidate│ ────────────────────────► │ cell, h │
//   └─────────┴─────────┴─────────┘                           └─────────┘
//
//   block:   256 elements: adjacent features, several rows of the batch if S < 256
//   shared:  nothing
//   thread:  one element (row, feature): three gates, cell and h; scan: its cell through all steps
#pragma once

#include <algorithm>
#include <cmath>

#include "core/cuda/common.cuh"
#include "lltm/op.h"

namespace ops::cuda {

constexpr int kLltmThreads = 256;

// Block of columns × rows of threads: up to 256 features, several rows of the batch if fewer.
struct LltmGrid {
  dim3 blocks, threads;

  explicit LltmGrid(const LltmSizes& sizes) {
    unsigned columns = 1;
    while (columns < kLltmThreads && columns < sizes.state) {
      columns *= 2;
    }
    threads = dim3(columns, kLltmThreads / columns);
    blocks = dim3(ceil_div(sizes.batch, threads.y),
                  std::min<int64_t>(ceil_div(sizes.state, threads.x), 65535));
  }
};

// σ(x) and σ(x) (1 − σ(x)), both without cancellation.
template <typename A>
struct Sigmoid {
  A value, slope;

  __device__ explicit Sigmoid(A x) {
    const A e = std::exp(x < 0 ? x : -x);
    const A inverse = 1 / (1 + e);
    value = x < 0 ? e * inverse : inverse;
    slope = e * inverse * inverse;
  }
};

// elu(x) and elu'(x)
template <typename A>
struct Elu {
  A value, slope;

  __device__ explicit Elu(A x) {
    value = x > 0 ? x : std::expm1(x);
    slope = x > 0 ? A(1) : std::exp(x);
  }
};

// tanh(x) and tanh'(x) = 1 − tanh²(x) = 4 e / (1 + e)², e = exp(−2 |x|)
template <typename A>
struct Tanh {
  A value, slope;

  __device__ explicit Tanh(A x) {
    const A e = std::exp(x < 0 ? 2 * x : -2 * x);
    const A inverse = 1 / (1 + e);
    value = std::tanh(x);
    slope = 4 * e * inverse * inverse;
  }
};

template <typename T>
__device__ acc_t<T> read(const StateInput<T>& values, int64_t i) {
  return values.tensor    ? static_cast<acc_t<T>>(values.tensor[i])
         : values.carried ? values.carried[i]
                          : acc_t<T>(0);
}

template <typename T>
__device__ void write(const StateOutput<T>& result, int64_t i, acc_t<T> value) {
  if (result.tensor) {
    result.tensor[i] = static_cast<T>(value);
  } else if (result.carried) {
    result.carried[i] = value;
  }
}

// The gates of one element before their activations: 0 input, 1 output, 2 candidate.
template <typename T>
struct Gates {
  const acc_t<T>* products;
  const T* bias;  // at the same column
  int64_t state;

  __device__ acc_t<T> operator[](int gate) const {
    const acc_t<T> x = products[gate * state];
    return bias ? x + static_cast<acc_t<T>>(bias[gate * state]) : x;
  }
};

template <typename T>
__device__ Gates<T> gates_at(const acc_t<T>* products, const T* bias, int64_t state, int64_t row,
                             int64_t column) {
  return {products + 3 * row * state + column, bias ? bias + column : nullptr, state};
}

// Compute and store cell and h from the gates.
template <typename T, typename Source>
__device__ void apply_gates(const LltmForward<T, T>& s, const Source& gates, int64_t i) {
  using A = acc_t<T>;
  const A cell = read(s.old_cell, i) + Elu<A>(gates[2]).value * Sigmoid<A>(gates[0]).value;
  const T h = static_cast<T>(Tanh<A>(cell).value * Sigmoid<A>(gates[1]).value);
  write(s.new_cell, i, cell);
  s.new_h[i] = h;
  if (s.last_h) {
    s.last_h[i] = h;
  }
}

template <typename T>
__device__ void run(const LltmForward<T, T>& s, const LltmSizes& sizes, int64_t row,
                    int64_t column) {
  const int64_t state = sizes.state;
  if (s.recurrent) {
    for (int gate = 0; gate < 3; ++gate) {
      const int64_t at = (3 * row + gate) * state + column;
      s.sums_out[at] += s.recurrent[at];
    }
  }
  // Read sums through the pointer that wrote them.
  const Gates<T> gates =
      gates_at(s.recurrent ? s.sums_out : s.products, s.bias, state, row, column);
  apply_gates(s, gates, row * state + column);
}

// One gradient per gate.
template <typename A>
struct GateGradients {
  A gate[3];
};

// Return the gradients of the gates; store the gradient of the old cell.
template <typename T, typename O, typename Source>
__device__ GateGradients<acc_t<T>> gate_gradients(const LltmBackward<T, O>& s, const Source& gates,
                                                  int64_t i) {
  using A = acc_t<T>;
  const Sigmoid<A> in(gates[0]), out(gates[1]);
  const Elu<A> candidate(gates[2]);
  const Tanh<A> cell(read(s.old_cell, i) + candidate.value * in.value);
  A grad_h = read(s.grad_h, i);
  if (s.grad_output) {
    grad_h += static_cast<A>(s.grad_output[i]);
  }
  const A grad_cell = read(s.grad_cell, i) + grad_h * out.value * cell.slope;
  write(s.grad_old_cell, i, grad_cell);
  return {grad_cell * candidate.value * in.slope, grad_h * cell.value * out.slope,
          grad_cell * in.value * candidate.slope};
}

template <typename T>
__device__ void run(const LltmBackward<T, T>& s, const LltmSizes& sizes, int64_t row,
                    int64_t column) {
  const int64_t state = sizes.state;
  const Gates<T> gates = gates_at(s.products, s.bias, state, row, column);
  const auto grads = gate_gradients(s, gates, row * state + column);
  if (s.grad_gates) {
    for (int gate = 0; gate < 3; ++gate) {
      s.grad_gates[(3 * row + gate) * state + column] = static_cast<T>(grads.gate[gate]);
    }
  }
}

// All steps in one launch: elements are independent.
template <typename T>
__device__ void run(const LltmScan<T>& s, const LltmSizes& sizes, int64_t row, int64_t column) {
  using A = acc_t<T>;
  const int64_t state = sizes.state, elements = sizes.batch * state, i = row * state + column;
  A cell = static_cast<A>(s.first_cell[i]);
  for (int64_t t = 0; t < sizes.steps - 1; ++t) {
    const Gates<T> gates = gates_at(s.products + 3 * t * elements, s.bias, state, row, column);
    cell += Elu<A>(gates[2]).value * Sigmoid<A>(gates[0]).value;
    s.cells[t * elements + i] = cell;
  }
}

template <typename Step>
__global__ void __launch_bounds__(kLltmThreads) lltm_kernel(Step step, LltmSizes sizes) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= sizes.batch) {
    return;
  }
  for (int64_t column = blockIdx.y * blockDim.x + threadIdx.x; column < sizes.state;
       column += static_cast<int64_t>(gridDim.y) * blockDim.x) {
    run(step, sizes, row, column);
  }
}

}  // namespace ops::cuda
