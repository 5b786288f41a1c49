// A step of the LLTM, a thread an element.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/cuda/common.cuh"
#include "lltm/op.h"

namespace ops::cuda {

constexpr int kLltmThreads = 256;

// Threads along the state, and rows of the batch beside each other where it is short.
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

// σ(x) and σ(x) (1 − σ(x)), each to its own last digits.
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
__device__ acc_t<T> read(const LltmValues<T>& values, int64_t i) {
  return values.outside   ? static_cast<acc_t<T>>(values.outside[i])
         : values.carried ? values.carried[i]
                          : acc_t<T>(0);
}

template <typename T>
__device__ void write(const LltmResult<T>& result, int64_t i, acc_t<T> value) {
  if (result.outside) {
    result.outside[i] = static_cast<T>(value);
  } else if (result.carried) {
    result.carried[i] = value;
  }
}

// The gates before their functions, from the element of the first; they are counted input, output,
// candidate.
template <typename T>
struct Gates {
  const acc_t<T>* products;
  const T* bias;  // of the same column
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

// What follows from the gates, however they come by their index.
template <typename T, typename Source>
__device__ void finish(const LltmForward<T, T>& s, const Source& gates, int64_t i) {
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
      s.summed[at] += s.recurrent[at];
    }
  }
  // What was summed up is read through the pointer that wrote it.
  const Gates<T> gates = gates_at(s.recurrent ? s.summed : s.products, s.bias, state, row, column);
  finish(s, gates, row * state + column);
}

// One value a gate.
template <typename A>
struct PerGate {
  A gate[3];
};

// The gradients of the gates, which it returns, and of the old cell.
template <typename T, typename O, typename Source>
__device__ PerGate<acc_t<T>> differentiate(const LltmBackward<T, O>& s, const Source& gates,
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
  const auto grads = differentiate(s, gates, row * state + column);
  if (s.grad_gates) {
    for (int gate = 0; gate < 3; ++gate) {
      s.grad_gates[(3 * row + gate) * state + column] = static_cast<T>(grads.gate[gate]);
    }
  }
}

// All steps in one launch: no step needs another element's.
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
