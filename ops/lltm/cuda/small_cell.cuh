// Small LLTM cells (batch ≤ 32), bound by launches: one fused kernel forward,
// one backward (small_cell_backward.cuh).
//
//   cell_forward_kernel: a warp computes a column of the state for 4 rows
//     [h, x] [4 rows]   ──┐ dot products over k,   reduce over lanes     gates
//     weights [3 gates] ──┘ lanes stride k ──────► 3 × 4 sums ─────────► cell, h, products
//   block:   4 columns (warps) × 4 rows of the batch
//   shared:  nothing
//   thread:  3 gates × 4 rows partial sums over k = lane, lane + 32, …
#pragma once

#include "lltm/cuda/step.cuh"

namespace ops::cuda {

constexpr int kWarp = 32;
constexpr int kCellColumns = 4;                        // of the state per block
constexpr int kCellRows = 4;                           // of the batch in registers
constexpr int kAheadColumns = 6;                       // loads in flight per thread and row
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
__global__ void __launch_bounds__(kWarp* kCellColumns)
    cell_forward_kernel(CellForward<T> cell, LltmSizes sizes) {
  using A = acc_t<T>;
  const int lane = threadIdx.x, batch = static_cast<int>(sizes.batch);
  const int state = static_cast<int>(sizes.state), columns = cell.concat.columns();
  const int column = blockIdx.x * kCellColumns + threadIdx.y, first = blockIdx.y * kCellRows;
  if (column >= state) {
    return;
  }
  const int row = first + lane;
  const bool valid = lane < kCellRows && row < batch;
  const int64_t at = static_cast<int64_t>(row) * state + column;
  A bias[3] = {}, new_cell = valid ? static_cast<A>(cell.step.old_cell.tensor[at]) : A(0);
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    bias[gate] = cell.step.bias ? static_cast<A>(cell.step.bias[gate * state + column]) : A(0);
  }
  A sums[3][kCellRows] = {};
  for (int next = lane; next - lane < columns; next += kAheadColumns * kWarp) {
    T values[kAheadColumns][kCellRows], weights[kAheadColumns][3];  // all in flight
#pragma unroll
    for (int i = 0; i < kAheadColumns; ++i) {
      const int k = next + i * kWarp;
#pragma unroll
      for (int r = 0; r < kCellRows; ++r) {
        values[i][r] = k < columns ? cell.concat(min(first + r, batch - 1), k) : T(0);
      }
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        weights[i][gate] = k < columns ? cell.weights[(gate * state + column) * columns + k] : T(0);
      }
    }
#pragma unroll
    for (int i = 0; i < kAheadColumns; ++i) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
#pragma unroll
        for (int r = 0; r < kCellRows; ++r) {
          sums[gate][r] += static_cast<A>(weights[i][gate]) * static_cast<A>(values[i][r]);
        }
      }
    }
  }
  A gates[3];
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    gates[gate] = sum_over_lanes<kWarp>(sums[gate], lane);
  }
  if (!valid) {
    return;
  }
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    cell.products[(3 * row + gate) * state + column] = gates[gate];
    gates[gate] += bias[gate];
  }
  cell.step.new_h[at] = static_cast<T>(apply_gates<T>(gates, new_cell));
  cell.step.new_cell.tensor[at] = static_cast<T>(new_cell);
}

template <typename T>
void launch_cell(const Tensor& like, const LltmSizes& sizes, const CellForward<T>& cell) {
  const DeviceGuard guard(like.get_device_index());
  launch_kernel(cell_forward_kernel<T>,
                dim3(ceil_div(sizes.state, kCellColumns), ceil_div(sizes.batch, kCellRows)),
                dim3(kWarp, kCellColumns), 0, current_stream(like), cell, sizes);
}

}  // namespace ops::cuda
