// Small LLTM cells (batch ≤ 32), bound by launches: one fused kernel forward, two backward.
//
//   cell_forward_kernel: a warp computes a column of the state for 4 rows
//     [h, x] [4 rows]   ──┐ dot products over k,   reduce over lanes     gates
//     weights [3 gates] ──┘ lanes stride k ──────► 3 × 4 sums ─────────► cell, h, products
//   block:   4 columns (warps) × 4 rows of the batch
//   shared:  nothing
//   thread:  3 gates × 4 rows partial sums over k = lane, lane + 32, …
//
//   cell_gate_gradient_kernel: gate gradients, then gradients of the weights and bias of these
//   gates
//     lane = row of the batch: gates ──► shared ──► lane = k: Σ rows gate · [h, x] ──► grad_weights
//   block:   4 columns of the state (12 rows of the weights), all rows of the batch
//   shared:  gate gradients [32 rows][3 gates × 4 columns]
//   thread:  3 gates of one (row, column); then 12 sums of one k, with 32 prefetched [h, x]
//
//   cell_input_gradient_kernel: [h, x] gradients = gates · weights, dependent launch
//     16 warps split the 3S gates ──► partial [16 warps][4 rows][32 columns] ──► sum in order
//   block:   32 columns of [h, x] × 4 rows of the batch
//   shared:  the partial sums
//   thread:  4 rows of one column over 1/16 of the gates; 24 weights prefetched
#pragma once

#include "lltm/cuda/step.cuh"

namespace ops::cuda {

constexpr int kWarp = 32;
constexpr int kCellColumns = 4;                        // of the state per block
constexpr int kCellRows = 4;                           // of the batch in registers
constexpr int kGateWarps = 8, kInputWarps = 16;        // warps per block of the backward kernels
constexpr int kPrefetchedWeights = 24;                 // loads in flight per thread
constexpr int kMaxCellBatch = kWarp;                   // a lane per row
constexpr int64_t kMaxCellWeights = int64_t{1} << 19;  // 3 S (S + I)

inline bool is_small(const LltmSizes& sizes) {
  return sizes.batch > 0 && sizes.batch <= kMaxCellBatch && sizes.state > 0 &&
         3 * sizes.state * (sizes.state + sizes.input) <= kMaxCellWeights;
}

// The concatenation [h, x] of a row, without a copy.
template <typename T>
struct ConcatInput {
  const T *h, *x;
  int state, input;

  __device__ T operator()(int row, int column) const {
    return column < state ? h[row * state + column] : x[row * input + column - state];
  }
  __device__ int columns() const { return state + input; }
};

template <typename T>
struct CellForward {
  ConcatInput<T> concat;
  const T* weights;
  acc_t<T>* products;
  LltmForward<T, T> step;
};

template <typename T>
struct CellBackward {
  ConcatInput<T> concat;
  const T* weights;
  acc_t<T>* gates;                                    // gate gradients [3S, kMaxCellBatch]
  T *grad_input, *grad_weights, *grad_bias, *grad_h;  // each may be null
  LltmBackward<T, T> step;
};

// Transpose-reduce kCellRows sums: lane l returns the total over the warp of sums[l % kCellRows].
template <typename A>
__device__ A sum_over_lanes(A (&sums)[kCellRows], int lane) {
#pragma unroll
  for (int half = kCellRows / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const A kept = upper ? sums[i + half] : sums[i];
      const A sent = upper ? sums[i] : sums[i + half];
      sums[i] = kept + __shfl_xor_sync(~0u, sent, half);
    }
  }
#pragma unroll
  for (int other = kCellRows; other < kWarp; other *= 2) {
    sums[0] += __shfl_xor_sync(~0u, sums[0], other);
  }
  return sums[0];
}

template <typename T>
__global__ void __launch_bounds__(kWarp* kCellColumns)
    cell_forward_kernel(CellForward<T> cell, LltmSizes sizes) {
  using A = acc_t<T>;
  const int lane = threadIdx.x, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.concat.columns();
  const int column = blockIdx.x * kCellColumns + threadIdx.y, first = blockIdx.y * kCellRows;
  if (column >= state) {
    return;
  }
  A sums[3][kCellRows] = {};
#pragma unroll 4
  for (int k = lane; k < columns; k += kWarp) {
    A values[kCellRows];
#pragma unroll
    for (int r = 0; r < kCellRows; ++r) {
      values[r] = static_cast<A>(cell.concat(min(first + r, batch - 1), k));
    }
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const A weight = static_cast<A>(cell.weights[(gate * state + column) * columns + k]);
#pragma unroll
      for (int r = 0; r < kCellRows; ++r) {
        sums[gate][r] += weight * values[r];
      }
    }
  }
  A gates[3];
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    gates[gate] = sum_over_lanes(sums[gate], lane);
  }
  const int row = first + lane;
  if (lane >= kCellRows || row >= batch) {
    return;
  }
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    cell.products[(3 * row + gate) * state + column] = gates[gate];
    if (cell.step.bias) {
      gates[gate] += static_cast<A>(cell.step.bias[gate * state + column]);
    }
  }
  apply_gates(cell.step, gates, static_cast<int64_t>(row) * state + column);
}

template <typename T>
__global__ void __launch_bounds__(kWarp* kGateWarps)
    cell_gate_gradient_kernel(CellBackward<T> cell, LltmSizes sizes) {
  using A = acc_t<T>;
  __shared__ __align__(16) A grads[kMaxCellBatch][3 * kCellColumns];  // [row][3 · column + gate]
  const int lane = threadIdx.x, warp = threadIdx.y, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.concat.columns();
  const int first = blockIdx.x * kCellColumns, column = first + warp;
  trigger_dependent_launch();
  T values[kMaxCellBatch];  // prefetch; a conversion here would stall on the loads
  const auto load = [&](int k) {
#pragma unroll
    for (int row = 0; row < kMaxCellBatch; ++row) {
      values[row] = row < batch && k < columns ? cell.concat(row, k) : T(0);
    }
  };
  const int first_k = kWarp * warp + lane;
  if (cell.grad_weights) {
    load(first_k);
  }
  if (warp < kCellColumns) {
    GateGradients<A> own{};
    if (lane < batch && column < state) {
      const Gates<T> gates = gates_at(cell.step.products, cell.step.bias, state, lane, column);
      own = gate_gradients(cell.step, gates, static_cast<int64_t>(lane) * state + column);
    }
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      grads[lane][3 * warp + gate] = own.gate[gate];
      if (column < state) {
        cell.gates[(gate * state + column) * kMaxCellBatch + lane] = own.gate[gate];
      }
      A sum = own.gate[gate];
      for (int half = kWarp / 2; half > 0; half /= 2) {
        sum += __shfl_xor_sync(~0u, sum, half);
      }
      if (cell.grad_bias && lane == 0 && column < state) {
        cell.grad_bias[gate * state + column] = static_cast<T>(sum);
      }
    }
  }
  __syncthreads();
  if (!cell.grad_weights) {
    return;
  }
  for (int k = first_k; k < columns; k += kWarp * kGateWarps) {
    if (k > first_k) {
      load(k);
    }
    A sums[3 * kCellColumns] = {};
#pragma unroll
    for (int row = 0; row < kMaxCellBatch; ++row) {
      if (row < batch) {
        const A value = static_cast<A>(values[row]);
#pragma unroll
        for (int i = 0; i < 3 * kCellColumns; ++i) {
          sums[i] += grads[row][i] * value;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 3 * kCellColumns; ++i) {
      if (first + i / 3 < state) {
        const int row = i % 3 * state + first + i / 3;
        cell.grad_weights[row * columns + k] = static_cast<T>(sums[i]);
      }
    }
  }
}

// Weights are prefetched before waiting for cell_gate_gradient_kernel.
template <typename T>
__global__ void __launch_bounds__(kWarp* kInputWarps)
    cell_input_gradient_kernel(CellBackward<T> cell, LltmSizes sizes, int first_column) {
  using A = acc_t<T>;
  __shared__ A partial[kInputWarps][kCellRows][kWarp];
  const int lane = threadIdx.x, warp = threadIdx.y, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.concat.columns();
  const int column = first_column + blockIdx.x * kWarp + lane, first = blockIdx.y * kCellRows;
  const int gates = 3 * state, share = (gates + kInputWarps - 1) / kInputWarps;
  const int begin = warp * share, end = column < columns ? min(gates, begin + share) : begin;
  T weights[kPrefetchedWeights];
  const auto load = [&](int gate) {
#pragma unroll
    for (int i = 0; i < kPrefetchedWeights; ++i) {
      weights[i] = gate + i < end ? cell.weights[(gate + i) * columns + column] : T(0);
    }
  };
  load(begin);
  wait_for_previous_kernel();
  A sums[kCellRows] = {};
  for (int gate = begin; gate < end; gate += kPrefetchedWeights) {
    if (gate > begin) {
      load(gate);
    }
#pragma unroll
    for (int i = 0; i < kPrefetchedWeights; ++i) {
      if (gate + i < end) {
        const A* from = cell.gates + (gate + i) * kMaxCellBatch + first;
        const auto grads = *reinterpret_cast<const Vector<A, kCellRows>*>(from);
#pragma unroll
        for (int r = 0; r < kCellRows; ++r) {
          sums[r] += static_cast<A>(weights[i]) * grads.lane[r];
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kCellRows; ++r) {
    partial[warp][r][lane] = sums[r];
  }
  __syncthreads();
  const int row = first + warp;
  if (warp >= kCellRows || row >= batch || column >= columns) {
    return;
  }
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kInputWarps; ++i) {
    sum += partial[i][warp][lane];
  }
  if (column >= state) {
    cell.grad_input[row * cell.concat.input + column - state] = static_cast<T>(sum);
  } else if (cell.grad_h) {
    cell.grad_h[row * state + column] = static_cast<T>(sum);
  }
}

template <typename T>
void launch_cell(const Tensor& like, const LltmSizes& sizes, const CellForward<T>& cell) {
  const DeviceGuard guard(like.get_device_index());
  launch_kernel(cell_forward_kernel<T>,
                dim3(ceil_div(sizes.state, kCellColumns), ceil_div(sizes.batch, kCellRows)),
                dim3(kWarp, kCellColumns), 0, current_stream(like), cell, sizes);
}

template <typename T>
void launch_cell(const Tensor& like, const LltmSizes& sizes, const CellBackward<T>& cell) {
  const DeviceGuard guard(like.get_device_index());
  launch_kernel(cell_gate_gradient_kernel<T>, dim3(ceil_div(sizes.state, kCellColumns)),
                dim3(kWarp, kGateWarps), 0, current_stream(like), cell, sizes);
  const int64_t first = cell.grad_h ? 0 : sizes.state;
  const int64_t end = cell.grad_input ? sizes.state + sizes.input : sizes.state;
  if (first < end) {
    launch_dependent(cell_input_gradient_kernel<T>,
                     dim3(ceil_div(end - first, kWarp), ceil_div(sizes.batch, kCellRows)),
                     dim3(kWarp, kInputWarps), current_stream(like), cell, sizes,
                     static_cast<int>(first));
  }
}

}  // namespace ops::cuda
