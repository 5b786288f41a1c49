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

// Advance the cell and return h.
template <typename T, typename Source>
__device__ acc_t<T> apply_gates(const Source& gates, acc_t<T>& cell) {
  cell += Elu<T>(gates[2]).value * Sigmoid<T>(gates[0]).value;
  return Tanh<T>(cell).value * Sigmoid<T>(gates[1]).value;
}

// Compute and store cell and h from the gates.
template <typename T, typename Source>
__device__ void apply_gates(const LltmForward<T, T>& s, const Source& gates, int64_t i) {
  acc_t<T> cell = read(s.old_cell, i);
  const T h = static_cast<T>(apply_gates<T>(gates, cell));
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

// Return first ? a : b without a branch, which nvcc would make around shuffles.
__device__ inline float select(unsigned first, float a, float b) {
  float result;
  asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %2, %3, p; }"
      : "=f"(result)
      : "r"(first), "f"(a), "f"(b));
  return result;
}
__device__ inline double select(unsigned first, double a, double b) {
  return first ? a : b;
}

// Transpose-reduce N sums over groups of kLanes lanes: lane l returns the total of sums[l % N].
template <int kLanes, int N, typename A>
__device__ A sum_over_lanes(const A (&sums)[N], int lane) {
  if constexpr (N > 1) {
    const unsigned upper = lane & (N / 2);
    A halves[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const A kept = select(upper, sums[i + N / 2], sums[i]);
      const A sent = select(upper, sums[i], sums[i + N / 2]);
      halves[i] = kept + __shfl_xor_sync(~0u, sent, N / 2);
    }
    A sum = sum_over_lanes<N / 2>(halves, lane);
#pragma unroll
    for (int other = N; other < kLanes; other *= 2) {
      sum += __shfl_xor_sync(~0u, sum, other);
    }
    return sum;
  } else {
    return sums[0];
  }
}

// One gradient per gate.
template <typename A>
struct GateGradients {
  A gate[3];
};

// Return the gradients of the gates; replace the gradient of the cell by that of the old cell.
template <typename T, typename Source>
__device__ GateGradients<acc_t<T>> gate_gradients(const Source& gates, acc_t<T> old_cell,
                                                  acc_t<T> grad_h, acc_t<T>& grad_cell) {
  const Sigmoid<T> in(gates[0]), out(gates[1]);
  const Elu<T> candidate(gates[2]);
  const Tanh<T> cell(old_cell + candidate.value * in.value);
  grad_cell += grad_h * out.value * cell.slope;
  return {grad_cell * candidate.value * in.slope, grad_h * cell.value * out.slope,
          grad_cell * in.value * candidate.slope};
}

// Return the gradients of the gates; store the gradient of the old cell.
template <typename T, typename O, typename Source>
__device__ GateGradients<acc_t<T>> gate_gradients(const LltmBackward<T, O>& s, const Source& gates,
                                                  int64_t i) {
  using A = acc_t<T>;
  A grad_h = read(s.grad_h, i), grad_cell = read(s.grad_cell, i);
  if (s.grad_output) {
    grad_h += static_cast<A>(s.grad_output[i]);
  }
  const auto grads = gate_gradients<T>(gates, read(s.old_cell, i), grad_h, grad_cell);
  write(s.grad_old_cell, i, grad_cell);
  return grads;
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
  constexpr int kAhead = 8;  // steps loaded at once
  const int64_t state = sizes.state, elements = sizes.batch * state, i = row * state + column;
  const A* sums = s.products + 3 * row * state + column;
  A cell = static_cast<A>(s.first_cell[i]), bias[3] = {};
  for (int gate = 0; s.bias && gate < 3; ++gate) {
    bias[gate] = static_cast<A>(s.bias[gate * state + column]);
  }
  for (int64_t first = 0; first < sizes.steps - 1; first += kAhead) {
    A input[kAhead], candidate[kAhead];
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int64_t at = 3 * min(first + ahead, sizes.steps - 1) * elements;
      input[ahead] = sums[at];
      candidate[ahead] = sums[at + 2 * state];
    }
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      if (first + ahead < sizes.steps - 1) {
        cell += Elu<T>(candidate[ahead] + bias[2]).value * Sigmoid<T>(input[ahead] + bias[0]).value;
        s.cells[(first + ahead) * elements + i] = cell;
      }
    }
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
