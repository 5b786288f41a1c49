// A cell of a short batch and few weights, where launches and small matrix products would take far
// longer than the arithmetic: one kernel forward, two backward, which read the weights once each.
#pragma once

#include "lltm.cuh"

namespace ops::cuda {

constexpr int kWarp = 32;
constexpr int kCellWarps = 4;          // columns of the state in a block
constexpr int kCellRows = 16;          // of the batch, together in registers
constexpr int kSplits = 8;             // of the sum over gates in grad_input and grad_old_h
constexpr int64_t kCellBatch = kWarp;  // most rows: a lane has one
constexpr int64_t kCellWeights = int64_t{1} << 19;  // most weights

inline bool is_small(const LltmSizes& sizes) {
  return sizes.batch > 0 && sizes.batch <= kCellBatch && sizes.state > 0 &&
         3 * sizes.state * (sizes.state + sizes.input) <= kCellWeights;
}

// The rows [h, x] that the weights' rows are multiplied with.
template <typename T>
struct Joined {
  const T *h, *x;
  int state, input;

  __device__ acc_t<T> operator()(int row, int column) const {
    return static_cast<acc_t<T>>(column < state ? h[row * state + column]
                                                : x[row * input + column - state]);
  }
  __device__ int columns() const { return state + input; }
};

template <typename T>
struct CellForward {
  Joined<T> joined;
  const T* weights;
  acc_t<T>* products;
  LltmForward<T, T> step;
};

template <typename T>
struct CellBackward {
  Joined<T> joined;
  const T* weights;
  acc_t<T>* gates;                                    // [N, 3S]: their gradients
  T *grad_input, *grad_weights, *grad_bias, *grad_h;  // each may be null
  LltmBackward<T, acc_t<T>> step;
};

// From 16 sums in every lane to the sum over all lanes of number lane % 16.
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
  return sums[0] + __shfl_xor_sync(~0u, sums[0], kCellRows);
}

// A warp makes a column of the state: its lanes share the three dot products of every row.
template <typename T>
__global__ void __launch_bounds__(kWarp* kCellWarps)
    cell_forward_kernel(CellForward<T> cell, LltmSizes sizes) {
  using A = acc_t<T>;
  const int lane = threadIdx.x, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.joined.columns();
  const int column = blockIdx.x * kCellWarps + threadIdx.y;
  if (column >= state) {
    return;
  }
  for (int first = 0; first < batch; first += kCellRows) {
    A sums[3][kCellRows] = {};
    for (int k = lane; k < columns; k += kWarp) {
      A values[kCellRows];
#pragma unroll
      for (int r = 0; r < kCellRows; ++r) {
        values[r] = first + r < batch ? cell.joined(first + r, k) : A(0);
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
    const int row = first + lane;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const A sum = sum_over_lanes(sums[gate], lane);
      if (lane < kCellRows && row < batch) {
        cell.products[(3 * row + gate) * state + column] = sum;
      }
    }
    if (lane < kCellRows && row < batch) {
      run(cell.step, sizes, row, column);
    }
  }
}

// A warp makes the gradients of a column's gates, a lane a row of the batch; then those of the
// column's three rows of weights and of its biases, which need no others.
template <typename T>
__global__ void __launch_bounds__(kWarp* kCellWarps)
    cell_gates_kernel(CellBackward<T> cell, LltmSizes sizes) {
  using A = acc_t<T>;
  const int lane = threadIdx.x, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.joined.columns();
  const int column = blockIdx.x * kCellWarps + threadIdx.y;
  if (column >= state) {
    return;
  }
  A gates[3] = {};
  if (lane < batch) {
    run(cell.step, sizes, lane, column);
    for (int gate = 0; gate < 3; ++gate) {
      gates[gate] = cell.gates[(3 * lane + gate) * state + column];
    }
  }
  if (cell.grad_weights) {
    for (int k = lane; k - lane < columns; k += kWarp) {
      A sums[3] = {};
      for (int row = 0; row < batch; ++row) {
        const A value = k < columns ? cell.joined(row, k) : A(0);
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          sums[gate] += __shfl_sync(~0u, gates[gate], row) * value;
        }
      }
      for (int gate = 0; k < columns && gate < 3; ++gate) {
        cell.grad_weights[(gate * state + column) * columns + k] = static_cast<T>(sums[gate]);
      }
    }
  }
  if (cell.grad_bias) {
    for (int gate = 0; gate < 3; ++gate) {
      A sum = gates[gate];
      for (int half = kWarp / 2; half > 0; half /= 2) {
        sum += __shfl_xor_sync(~0u, sum, half);
      }
      if (lane == 0) {
        cell.grad_bias[gate * state + column] = static_cast<T>(sum);
      }
    }
  }
}

// The gradients of [h, x]: a lane a column; the warps share the sum over the gates.
template <typename T>
__global__ void __launch_bounds__(kWarp* kSplits)
    cell_inputs_kernel(CellBackward<T> cell, LltmSizes sizes, int first_column) {
  using A = acc_t<T>;
  __shared__ A partial[kSplits][kCellRows][kWarp];
  const int lane = threadIdx.x, split = threadIdx.y, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.joined.columns();
  const int column = first_column + blockIdx.x * kWarp + lane, first = blockIdx.y * kCellRows;
  const int gates = 3 * state, share = (gates + kSplits - 1) / kSplits;
  A sums[kCellRows] = {};
  if (column < columns) {
    const int end = min(gates, (split + 1) * share);
#pragma unroll 4
    for (int gate = split * share; gate < end; ++gate) {
      const A weight = static_cast<A>(cell.weights[gate * columns + column]);
#pragma unroll
      for (int r = 0; r < kCellRows; ++r) {
        const int row = min(first + r, batch - 1);
        sums[r] += weight * cell.gates[row * gates + gate];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kCellRows; ++r) {
    partial[split][r][lane] = sums[r];
  }
  __syncthreads();
  for (int r = split; r < kCellRows && first + r < batch; r += kSplits) {
    A sum = 0;
    for (int i = 0; i < kSplits; ++i) {
      sum += partial[i][r][lane];
    }
    const int row = first + r;
    if (column < state && cell.grad_h) {
      cell.grad_h[row * state + column] = static_cast<T>(sum);
    } else if (column >= state && column < columns && cell.grad_input) {
      cell.grad_input[row * cell.joined.input + column - state] = static_cast<T>(sum);
    }
  }
}

template <typename T>
void launch_cell(const Tensor& like, const LltmSizes& sizes, const CellForward<T>& cell) {
  const DeviceGuard guard(like.get_device_index());
  launch_kernel(cell_forward_kernel<T>, dim3(ceil_div(sizes.state, kCellWarps)),
                dim3(kWarp, kCellWarps), 0, current_stream(like), cell, sizes);
}

template <typename T>
void launch_cell(const Tensor& like, const LltmSizes& sizes, const CellBackward<T>& cell) {
  const DeviceGuard guard(like.get_device_index());
  launch_kernel(cell_gates_kernel<T>, dim3(ceil_div(sizes.state, kCellWarps)),
                dim3(kWarp, kCellWarps), 0, current_stream(like), cell, sizes);
  const int64_t first = cell.grad_h ? 0 : sizes.state;
  const int64_t end = cell.grad_input ? sizes.state + sizes.input : sizes.state;
  if (first < end) {
    launch_kernel(
        cell_inputs_kernel<T>, dim3(ceil_div(end - first, kWarp), ceil_div(sizes.batch, kCellRows)),
        dim3(kWarp, kSplits), 0, current_stream(like), cell, sizes, static_cast<int>(first));
  }
}

}  // namespace ops::cuda
