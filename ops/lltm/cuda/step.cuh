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

#include "core/cuda/common.cuh"
#include "lltm/cuda/activations.cuh"
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

template <typename T>
__device__ void run(const LltmForward<T, T>& s, const LltmSizes& sizes, int64_t row,
                    int64_t column) {
  using A = acc_t<T>;
  const int64_t state = sizes.state, i = row * state + column;
  if (s.recurrent) {
    for (int gate = 0; gate < 3; ++gate) {
      const int64_t at = (3 * row + gate) * state + column;
      s.sums_out[at] += s.recurrent[at];
    }
  }
  // Read sums through the pointer that wrote them.
  const Gates<T> gates =
      gates_at(s.recurrent ? s.sums_out : s.products, s.bias, state, row, column);
  const A cell = read(s.old_cell, i) + Elu<A>(gates[2]).value * Sigmoid<A>(gates[0]).value;
  const T h = static_cast<T>(Tanh<A>(cell).value * Sigmoid<A>(gates[1]).value);
  write(s.new_cell, i, cell);
  s.new_h[i] = h;
  if (s.last_h) {
    s.last_h[i] = h;
  }
}

template <typename T>
__device__ void run(const LltmBackward<T, T>& s, const LltmSizes& sizes, int64_t row,
                    int64_t column) {
  using A = acc_t<T>;
  const int64_t state = sizes.state, i = row * state + column;
  const Gates<T> gates = gates_at(s.products, s.bias, state, row, column);
  const Sigmoid<A> in(gates[0]), out(gates[1]);
  const Elu<A> candidate(gates[2]);
  const Tanh<A> cell(read(s.old_cell, i) + candidate.value * in.value);
  A grad_h = read(s.grad_h, i);
  if (s.grad_output) {
    grad_h += static_cast<A>(s.grad_output[i]);
  }
  const A grad_cell = read(s.grad_cell, i) + grad_h * out.value * cell.slope;
  write(s.grad_old_cell, i, grad_cell);
  if (s.grad_gates) {
    T* grad = s.grad_gates + 3 * row * state + column;
    grad[0] = static_cast<T>(grad_cell * candidate.value * in.slope);
    grad[state] = static_cast<T>(grad_h * cell.value * out.slope);
    grad[2 * state] = static_cast<T>(grad_cell * in.value * candidate.slope);
  }
}

// All steps in one launch: elements are independent.
template <typename T>
__device__ void run(const LltmScan<T>& s, const LltmSizes& sizes, int64_t row, int64_t column) {
  using A = acc_t<T>;
  const int64_t state = sizes.state, elements = sizes.batch * state, i = row * state + column;
  const A* sums = s.products + 3 * row * state + column;
  const A input_bias = s.bias ? static_cast<A>(s.bias[column]) : A(0);
  const A candidate_bias = s.bias ? static_cast<A>(s.bias[2 * state + column]) : A(0);
  A cell = static_cast<A>(s.first_cell[i]);
#pragma unroll 8  // __ldg: loads of later steps need not wait for the stores of earlier ones
  for (int64_t t = 0; t < sizes.steps - 1; ++t) {
    const A input = __ldg(sums + 3 * t * elements) + input_bias;
    const A candidate = __ldg(sums + 3 * t * elements + 2 * state) + candidate_bias;
    cell += Elu<A>(candidate).value * Sigmoid<A>(input).value;
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
