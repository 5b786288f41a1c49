// Backward of small LLTM cells (batch ≤ 32) in one kernel.
//
// Blocks are of two kinds; each computes the gate gradients that it needs.
//
//   weight_gradients: gradients of the weights, the bias and the old cell
//     lane = row of the batch: gates ──► shared ──► lane = k: Σ rows gate · [h, x] ──► grad_weights
//   block:   4 columns of the state (12 rows of the weights), all rows of the batch
//   shared:  gate gradients [16 or 32 rows][3 gates × 4 columns]
//   thread:  3 gates of one (row, column); then 12 sums of one k. Loads all rows of [h, x] first
//
//   input_gradients: [h, x] gradients = gates · weights
//     16 warps split the 3S gates ──► partial [16 warps][4 rows][32 columns] ──► sum in order
//   block:   32 columns of [h, x] × 4 rows of the batch
//   shared:  gate gradients [3S][4 rows]; the partial sums
//   thread:  4 rows of one column over 1/16 of the gates; 24 weights prefetched
#pragma once

#include "lltm/cuda/small_cell.cuh"

namespace ops::cuda {

constexpr int kCellWarps = 16;          // per block of the backward kernel
constexpr int kPrefetchedWeights = 24;  // loads in flight per thread

template <typename T>
struct CellBackward {
  ConcatInput<T> concat;
  const T* weights;
  T *grad_input, *grad_weights, *grad_bias, *grad_h;  // each may be null
  LltmBackward<T, T> step;
  int weight_blocks = 0;  // blocks for weights, bias and old cell
  int first_column = 0;   // of [h, x] with a gradient
};

// kBatch: largest batch, 16 or 32
template <int kBatch, typename T>
__device__ void weight_gradients(const CellBackward<T>& cell, const LltmSizes& sizes, int block) {
  using A = acc_t<T>;
  __shared__ __align__(16) A grads[kBatch][3 * kCellColumns];  // [row][3 · column + gate]
  const int lane = threadIdx.x, warp = threadIdx.y, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.concat.columns();
  const int first = block * kCellColumns, column = first + warp;
  T values[kBatch];  // prefetch; a conversion here would stall on the loads
  const auto load = [&](int k) {
#pragma unroll
    for (int row = 0; row < kBatch; ++row) {
      values[row] = row < batch && k < columns ? cell.concat(row, k) : T(0);
    }
  };
  const int first_k = kWarp * warp + lane;
  if (cell.grad_weights) {
    load(first_k);
  }
  GateGradients<A> own{};
  if (warp < kCellColumns) {
    if (lane < batch && column < state) {
      const Gates<T> gates = gates_at(cell.step.products, cell.step.bias, state, lane, column);
      own = gate_gradients(cell.step, gates, static_cast<int64_t>(lane) * state + column);
    }
    if (lane < kBatch) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        grads[lane][3 * warp + gate] = own.gate[gate];
      }
    }
  }
  __syncthreads();
  if (cell.grad_bias && warp < kCellColumns && column < state) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      A sum = own.gate[gate];
      for (int half = kWarp / 2; half > 0; half /= 2) {
        sum += __shfl_xor_sync(~0u, sum, half);
      }
      if (lane == 0) {
        cell.grad_bias[gate * state + column] = static_cast<T>(sum);
      }
    }
  }
  if (!cell.grad_weights) {
    return;
  }
  for (int k = first_k; k - lane < columns; k += kWarp * kCellWarps) {
    if (k > first_k) {
      load(k);
    }
    __syncwarp();  // or nvcc loads all of grads before the loop
    A sums[3 * kCellColumns] = {};
#pragma unroll
    for (int row = 0; row < kBatch; ++row) {
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
      if (k < columns && first + i / 3 < state) {
        const int row = i % 3 * state + first + i / 3;
        cell.grad_weights[row * columns + k] = static_cast<T>(sums[i]);
      }
    }
  }
}

// Weights are prefetched before the gate gradients are computed.
template <typename T>
__device__ void input_gradients(const CellBackward<T>& cell, const LltmSizes& sizes, int block) {
  using A = acc_t<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ A partial[kCellWarps][kCellRows][kWarp];
  auto* const grads = reinterpret_cast<Vector<A, kCellRows>*>(shared);  // [3S]
  const int lane = threadIdx.x, warp = threadIdx.y, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.concat.columns();
  const int row_blocks = (batch + kCellRows - 1) / kCellRows;
  const int first = block % row_blocks * kCellRows;
  const int column = cell.first_column + block / row_blocks * kWarp + lane;
  const int gates = 3 * state, share = (gates + kCellWarps - 1) / kCellWarps;
  const int begin = warp * share, end = column < columns ? min(gates, begin + share) : begin;
  T weights[kPrefetchedWeights];
  const auto load = [&](int gate) {
#pragma unroll
    for (int i = 0; i < kPrefetchedWeights; ++i) {
      weights[i] = gate + i < end ? cell.weights[(gate + i) * columns + column] : T(0);
    }
  };
  load(begin);
  auto step = cell.step;
  step.grad_old_cell = {};
  const int r = warp % kCellRows;
  for (int c = warp / kCellRows * kWarp + lane; c < state; c += kCellWarps / kCellRows * kWarp) {
    GateGradients<A> own{};
    if (first + r < batch) {
      const auto at = gates_at(step.products, step.bias, state, first + r, c);
      own = gate_gradients(step, at, static_cast<int64_t>(first + r) * state + c);
    }
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      grads[gate * state + c].lane[r] = own.gate[gate];
    }
  }
  __syncthreads();
  A sums[kCellRows] = {};
  for (int gate = begin; gate < end; gate += kPrefetchedWeights) {
    if (gate > begin) {
      load(gate);
    }
#pragma unroll
    for (int i = 0; i < kPrefetchedWeights; ++i) {
      if (gate + i < end) {
        const auto values = grads[gate + i];
#pragma unroll
        for (int row = 0; row < kCellRows; ++row) {
          sums[row] += static_cast<A>(weights[i]) * values.lane[row];
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kCellRows; ++row) {
    partial[warp][row][lane] = sums[row];
  }
  __syncthreads();
  const int row = first + warp;
  if (warp >= kCellRows || row >= batch || column >= columns) {
    return;
  }
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kCellWarps; ++i) {
    sum += partial[i][warp][lane];
  }
  if (column < state) {
    if (cell.grad_h) {
      cell.grad_h[row * state + column] = static_cast<T>(sum);
    }
  } else if (cell.grad_input) {  // the last block of grad_h alone has columns of x
    cell.grad_input[row * cell.concat.input + column - state] = static_cast<T>(sum);
  }
}

template <int kBatch, typename T>
__global__ void __launch_bounds__(kWarp* kCellWarps, 1)
    cell_backward_kernel(CellBackward<T> cell, LltmSizes sizes) {
  const int block = static_cast<int>(blockIdx.x);
  if (block < cell.weight_blocks) {
    weight_gradients<kBatch>(cell, sizes, block);
  } else {
    input_gradients(cell, sizes, block - cell.weight_blocks);
  }
}

template <typename T>
void launch_cell(const Tensor& like, const LltmSizes& sizes, CellBackward<T> cell) {
  const DeviceGuard guard(like.get_device_index());
  const bool weights = cell.grad_weights || cell.grad_bias || cell.step.grad_old_cell.tensor;
  cell.weight_blocks = weights ? ceil_div(sizes.state, kCellColumns) : 0;
  cell.first_column = cell.grad_h ? 0 : sizes.state;
  const int64_t end = cell.grad_input ? sizes.state + sizes.input : sizes.state;
  const int64_t columns = std::max<int64_t>(0, end - cell.first_column);
  const int64_t input_blocks = ceil_div(columns, kWarp) * ceil_div(sizes.batch, kCellRows);
  if (cell.weight_blocks + input_blocks > 0) {
    launch_kernel(sizes.batch <= 16 ? cell_backward_kernel<16, T> : cell_backward_kernel<32, T>,
                  dim3(cell.weight_blocks + input_blocks), dim3(kWarp, kCellWarps),
                  input_blocks > 0 ? 3 * sizes.state * sizeof(Vector<acc_t<T>, kCellRows>) : 0,
                  current_stream(like), cell, sizes);
  }
}

}  // namespace ops::cuda
