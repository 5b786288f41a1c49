// LLTM over a sequence in one kernel, float32: the weights stay in registers.
//
//   forward: 8 lanes share 4 features × 3 gates       h, 2 rows, shared memory
//   ┌────────────────────────┐                        ┌───────────────┐
//   │ lane 0 │ 1 │ … │ lane 7│ S columns         ·    │ row 0: S      │ ──► 3 × 8 partial sums,
//   │        │   │   │       │ of weights_h           │ row 1: S      │     reduced over the lanes
//   └────────────────────────┘                        └───────────────┘
//   lane: gates of one feature of one row ──► cell (registers), h ──► shared, barrier, next step
//
//   backward, from the last step: 16 lanes share 8 features of h and the 3S gate gradients
//
//   block:   2 rows of the batch, all features and steps
//   shared:  h (backward: gate gradients) of two steps
//   thread:  192 weights; one feature of one row: all gates, cell and h
#pragma once

#include "lltm/cuda/persistent.cuh"

namespace ops::cuda {

// Feature and row of a thread; offsets are from the first row of the block. kLanes lanes share
// kLanes / 2 features.
template <int kLanes>
struct Element {
  int64_t block_row, step;        // step: N · S
  int lane, first, feature, row;  // first: of the features that the lanes share
  bool valid;                     // row within the batch
  unsigned state, gates[3];       // offsets in [N, S] and [N, 3S]

  __device__ explicit Element(const LltmSizes& sizes) {
    const unsigned s = sizes.state;
    block_row = static_cast<int64_t>(blockIdx.x) * kFmaRows;
    step = sizes.batch * sizes.state;
    lane = threadIdx.x % kLanes;
    first = threadIdx.x / kLanes * (kLanes / 2);
    feature = first + lane % (kLanes / 2);
    row = lane / (kLanes / 2);
    valid = block_row + row < sizes.batch;
    state = row * s + feature;
    for (int gate = 0; gate < 3; ++gate) {
      gates[gate] = (3 * row + gate) * s + feature;
    }
  }
};

// sums[row * kFeatures + f] += weights[f] · right[row]: kDepth columns of a lane, 4 of every
// 4 · kLanes.
template <int kLanes, int kFeatures, int kDepth>
__device__ void multiply_rows(float (&sums)[kFmaRows * kFeatures],
                              const float (&weights)[kFeatures][kDepth], const float* right,
                              int lane, int j, int row) {
  const auto values = load_vector<4>(right + (row * kDepth / 4 + j) * 4 * kLanes + 4 * lane);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
      sums[row * kFeatures + f] += weights[f][4 * j + k] * values.lane[k];
    }
  }
}

// kDepth: columns per lane
template <int kDepth>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_fma_forward_kernel(PersistentForward<float> p, LltmSizes sizes) {
  constexpr int kLanes = 8, kFeatures = 4;
  __shared__ __align__(16) float h[2][kFmaRows][kLanes * kDepth];
  const Element<kLanes> own(sizes);
  const int state = static_cast<int>(sizes.state);
  const int64_t wide = state + sizes.input, first = own.block_row * state;
  float weights[3][kFeatures][kDepth];
  const auto load_weights = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
#pragma unroll
    for (int row = 0; row < 3 * kFeatures; ++row) {
      const int gate = row / kFeatures, f = row % kFeatures;
      const float* from = p.weights + (gate * state + own.first + f) * wide;
#pragma unroll
      for (int k = 0; k < kDepth; k += kWidth) {
        const int column = k / 4 * 4 * kLanes + 4 * own.lane + k % 4;
        Vector<float, kWidth> values{};
        if (column < state) {
          values = load_vector<kWidth>(from + column);
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          weights[gate][f][k + i] = values.lane[i];
        }
      }
    }
  };
  if (wide % 4 == 0 && reinterpret_cast<uintptr_t>(p.weights) % 16 == 0) {
    load_weights(Width<4>{});
  } else {
    load_weights(Width<1>{});
  }
  float* products = p.products + 3 * first;
  float* output = p.output + first;
  float next[3] = {}, bias[3][1], cell = 0, new_h = 0;
  const auto load = [&] {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      next[gate] = own.valid ? products[own.gates[gate]] : 0.0f;
    }
  };
  load();
  load_bias(bias, p.bias, state, own.feature);
  if (own.valid) {
    cell = p.old_cell[first + own.state];
    new_h = p.old_h[first + own.state];
  }
  clear(h);
  __syncthreads();
  h[0][own.row][own.feature] = new_h;
  __syncthreads();
  for (int64_t t = 0; t < sizes.steps; ++t) {
    float sums[3][kFmaRows * kFeatures] = {};
#pragma unroll
    for (int j = 0; j < kDepth / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 3 * kFmaRows; ++i) {
        multiply_rows<kLanes>(sums[i % 3], weights[i % 3], h[t % 2][0], own.lane, j, i / 3);
      }
    }
    float gates[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      next[gate] += sum_over_lanes<kLanes>(sums[gate], own.lane);
      gates[gate] = next[gate] + bias[gate][0];
      if (own.valid) {
        products[own.gates[gate]] = next[gate];
      }
    }
    products += 3 * own.step;
    if (t + 1 < sizes.steps) {
      load();
    }
    new_h = apply_gates<float>(gates, cell);
    h[(t + 1) % 2][own.row][own.feature] = new_h;
    __syncthreads();
    if (own.valid) {
      output[own.state] = new_h;
    }
    output += own.step;
  }
  if (own.valid) {
    p.last_h[first + own.state] = new_h;
    p.last_cell[first + own.state] = cell;
  }
}

// kDepth: gates per lane
template <int kDepth>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_fma_backward_kernel(PersistentBackward<float> p, LltmSizes sizes) {
  constexpr int kLanes = 16, kFeatures = 8, kChunk = 4 * kLanes;  // gates of all lanes
  __shared__ __align__(16) float grads[2][kFmaRows][kLanes * kDepth];
  __shared__ __align__(16) float stage[kChunk][kDepth * kLanes / 3 + 4];
  const Element<kLanes> own(sizes);
  const int state = static_cast<int>(sizes.state);
  const int64_t wide = state + sizes.input, first = own.block_row * state;
  float weights[kFeatures][kDepth];
#pragma unroll
  for (int j = 0; j < kDepth / 4; ++j) {  // lane + 16 i is the lane's gate i of a chunk
    const int column = threadIdx.x % state;
    float loaded[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const int row = kChunk * j + 2 * i + threadIdx.x / state;
      loaded[i] = row < 3 * state ? p.weights[row * wide + column] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      stage[2 * i + threadIdx.x / state][column] = loaded[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int f = 0; f < kFeatures; f += 4) {
        const auto values = load_vector<4>(&stage[own.lane + kLanes * i][own.first + f]);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          weights[f + v][4 * j + i] = values.lane[v];
        }
      }
    }
  }
  float products[3], old_cell, grad_output, bias[3][1], grad_bias[3] = {};
  const auto load = [&](int64_t t) {
    const int64_t at = t * own.step + first;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      products[gate] = own.valid ? p.products[3 * at + own.gates[gate]] : 0.0f;
    }
    const float* cells = t > 0 ? p.cells + at - own.step : p.old_cell + first;
    old_cell = own.valid ? cells[own.state] : 0.0f;
    grad_output = own.valid ? load_or_zero(p.grad_output, at + own.state) : 0.0f;
  };
  load(sizes.steps - 1);
  load_bias(bias, p.bias, state, own.feature);
  float grad_h = own.valid ? load_or_zero(p.grad_last_h, first + own.state) : 0.0f;
  float grad_cell = own.valid ? load_or_zero(p.grad_last_cell, first + own.state) : 0.0f;
  clear(grads);
  __syncthreads();
  for (int64_t t = sizes.steps - 1; t >= 0; --t) {
    const float gates[3] = {products[0] + bias[0][0], products[1] + bias[1][0],
                            products[2] + bias[2][0]};
    const auto own_grads = gate_gradients<float>(gates, old_cell, grad_h + grad_output, grad_cell);
    float* to = p.grad_gates + 3 * (t * own.step + first);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const int at = gate * state + own.feature;
      grads[t % 2][own.row][at / kChunk * kChunk + at % kLanes * 4 + at % kChunk / kLanes] =
          own_grads.gate[gate];
      if (own.valid) {
        to[own.gates[gate]] = own_grads.gate[gate];
        grad_bias[gate] += own_grads.gate[gate];
      }
    }
    if (t > 0) {
      load(t - 1);
    }
    __syncthreads();
    float sums[kFmaRows * kFeatures] = {};
#pragma unroll
    for (int j = 0; j < kDepth / 4; ++j) {
#pragma unroll
      for (int row = 0; row < kFmaRows; ++row) {
        multiply_rows<kLanes>(sums, weights, grads[t % 2][0], own.lane, j, row);
      }
    }
    grad_h = sum_over_lanes<kLanes>(sums, own.lane);
  }
  if (own.valid && p.grad_old_h) {
    p.grad_old_h[first + own.state] = grad_h;
  }
  if (own.valid && p.grad_old_cell) {
    p.grad_old_cell[first + own.state] = grad_cell;
  }
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    const float sum = grad_bias[gate] + __shfl_xor_sync(~0u, grad_bias[gate], kFeatures);
    if (p.grad_bias && own.row == 0) {
      p.grad_bias[(3 * blockIdx.x + gate) * state + own.feature] = sum;
    }
  }
}

inline auto persistent_kernel(const PersistentForward<float>&, int64_t state) {
  return state <= 64 ? persistent_fma_forward_kernel<8> : persistent_fma_forward_kernel<16>;
}
inline auto persistent_kernel(const PersistentBackward<float>&, int64_t state) {
  return state <= 64 ? persistent_fma_backward_kernel<12> : persistent_fma_backward_kernel<24>;
}

}  // namespace ops::cuda
