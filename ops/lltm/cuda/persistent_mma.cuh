// LLTM over a sequence in one kernel, 16 bits, on matrix units: the weights stay in registers.
//
//   weights_h in registers         h, 8 rows of the batch        gates of 8 rows
//   ┌──────────────┐               ┌───┐ shared memory           ┌───┐
//   │ warp 0  ×3   │ 16 features   │   │                         │   │ bias, σ, elu, tanh
//   │ warp 1  ×3   │ of each gate  │ S │  ──────────────────────►│ S │ ──► cell (registers), h
//   │ …            │               │   │  + x · weights_xᵀ       │   │          │
//   └──────────────┘ S columns     └───┘                         └───┘          │
//                                    ▲                     one barrier per step │
//                                    └──────────────────────────────────────────┘
//   backward, from the last step: gate gradients [3S] in shared memory, weights_h transposed
//
//   block:   8 rows of the batch, all features and steps
//   shared:  h (backward: gate gradients) of two steps; before the first step: weights
//   thread:  2 features × 2 rows: all gates, cell and h
#pragma once

#include "lltm/cuda/persistent.cuh"
#include "lltm/cuda/persistent_operands.cuh"

namespace ops::cuda {

// The 2 features × 2 rows of a thread; offsets are from the first row of the block. An element has
// index 2 · (feature − first feature) + row − first row.
struct Elements {
  int64_t block_row, step;  // step: N · S
  int feature, row;         // the first ones
  bool valid[2];            // rows within the batch
  unsigned state[2];        // offset in [N, S] of the first feature, per row
  unsigned gates[3][2];     // in [N, 3S]

  __device__ explicit Elements(const LltmSizes& sizes) {
    const Lane lane;
    const unsigned s = sizes.state;
    block_row = static_cast<int64_t>(blockIdx.x) * kMmaRows;
    step = sizes.batch * sizes.state;
    feature = threadIdx.x / 32 * 16 + 2 * lane.g;
    row = 2 * lane.t;
    for (int r = 0; r < 2; ++r) {
      valid[r] = block_row + row + r < sizes.batch;
      state[r] = (row + r) * s + feature;
      for (int gate = 0; gate < 3; ++gate) {
        gates[gate][r] = (3 * (row + r) + gate) * s + feature;
      }
    }
  }
};

// Load the elements of a thread from [N, S], or zeros.
template <typename T>
__device__ void load_state(float (&values)[4], const T* from, const Elements& own) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool valid = from && own.valid[i % 2];
    values[i] = valid ? static_cast<float>(from[own.state[i % 2] + i / 2]) : 0.0f;
  }
}

__device__ inline float2 load_pair_or_zero(const float* from, bool valid) {
  return valid ? *reinterpret_cast<const float2*>(from) : make_float2(0, 0);
}

template <typename T>
__device__ void store_pair(T* to, unsigned pair, bool valid) {
  if (valid) {
    *reinterpret_cast<unsigned*>(to) = pair;
  }
}

template <typename T, int kTiles>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_mma_forward_kernel(PersistentForward<T> p, LltmSizes sizes) {
  __shared__ SharedRows<kTiles> h[2];
  __shared__ __align__(16) typename Weights<T, kTiles>::Stage stage[kPersistentThreads / 32];
  const Lane lane;
  const Elements own(sizes);
  const int state = static_cast<int>(sizes.state), warp = threadIdx.x / 32;
  const int64_t wide = sizes.state + sizes.input, first = own.block_row * state;
  const bool aligned = wide % 2 == 0 && reinterpret_cast<uintptr_t>(p.weights) % 4 == 0;
  Weights<T, kTiles> weights[3];
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    const T* from = p.weights + (gate * state + 16 * warp) * wide;
    weights[gate].template load<false>(stage[warp], from, wide, state, aligned);
  }
  float *products = p.products + 3 * first, *sums_out = products;
  T* output = p.output + first;
  float2 next[3][2];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      next[i / 2][i % 2] = load_pair_or_zero(products + own.gates[i / 2][i % 2], own.valid[i % 2]);
    }
    products += 3 * own.step;
  };
  load();
  float bias[3][2], cell[4], old_h[4];
  load_bias(bias, p.bias, state, own.feature);
  load_state(cell, p.old_cell + first, own);
  load_state(old_h, p.old_h + first, own);
  clear(h);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    h[0].store(own.row + r, own.feature / 2, Packed<T>::pack(old_h[r], old_h[2 + r]));
  }
  __syncthreads();
  float sums[3][4];
  unsigned words[2];
  const auto store = [&] {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_pair(output + own.state[r], words[r], own.valid[r]);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        if (own.valid[r]) {
          *reinterpret_cast<float2*>(sums_out + own.gates[gate][r]) =
              make_float2(sums[gate][r], sums[gate][2 + r]);
        }
      }
    }
    output += own.step;
    sums_out += 3 * own.step;
  };
  for (int64_t t = 0; t < sizes.steps; ++t) {
    float recurrent[3][4] = {};
    multiply_gates(recurrent, weights, h[t % 2]);
    if (t > 0) {
      store();  // here, not to delay the loads of h
    }
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const int gate = i / 2, r = i % 2;
      sums[gate][r] = recurrent[gate][r] + next[gate][r].x;
      sums[gate][2 + r] = recurrent[gate][2 + r] + next[gate][r].y;
    }
    if (t + 1 < sizes.steps) {
      load();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float values[2];
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const int i = 2 * f + r;
        const float gates[3] = {sums[0][i] + bias[0][f], sums[1][i] + bias[1][f],
                                sums[2][i] + bias[2][f]};
        values[f] = apply_gates<T>(gates, cell[i]);
      }
      words[r] = Packed<T>::pack(values[0], values[1]);
      h[(t + 1) % 2].store(own.row + r, own.feature / 2, words[r]);
    }
    __syncthreads();
  }
  store();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    store_pair(p.last_h + first + own.state[r], words[r], own.valid[r]);
    store_pair(p.last_cell + first + own.state[r], Packed<T>::pack(cell[r], cell[2 + r]),
               own.valid[r]);
  }
}

template <typename T, int kTiles>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_mma_backward_kernel(PersistentBackward<T> p, LltmSizes sizes) {
  __shared__ SharedRows<kTiles> grads[2][3];
  __shared__ __align__(16) typename Weights<T, kTiles>::Stage stage[kPersistentThreads / 32];
  const Lane lane;
  const Elements own(sizes);
  const int state = static_cast<int>(sizes.state), warp = threadIdx.x / 32;
  const int64_t wide = sizes.state + sizes.input, first = own.block_row * state;
  const bool aligned = wide % 2 == 0 && reinterpret_cast<uintptr_t>(p.weights) % 4 == 0;
  Weights<T, kTiles> weights[3];
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
    const T* from = p.weights + gate * state * wide + 16 * warp;
    weights[gate].template load<true>(stage[warp], from, wide, state, aligned);
  }
  const bool pairs = reinterpret_cast<uintptr_t>(p.grad_output) % 4 == 0;
  float2 products[3][2], cells[2];
  unsigned grad_output[2];  // pairs of features
  float grad_h[4], grad_cell[4], bias[3][2], grad_bias[3][2] = {};
  const auto load = [&](int64_t t) {
    const int64_t at = t * own.step + first;
    const float* sums = p.products + 3 * at;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      products[i / 2][i % 2] = load_pair_or_zero(sums + own.gates[i / 2][i % 2], own.valid[i % 2]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool any = p.grad_output && own.valid[r];
      grad_output[r] = any ? load_pair(p.grad_output + at + own.state[r], pairs) : 0;
      if (t > 0) {
        cells[r] = load_pair_or_zero(p.cells + at - own.step + own.state[r], own.valid[r]);
      }
    }
  };
  load(sizes.steps - 1);
  load_bias(bias, p.bias, state, own.feature);
  load_state(grad_h, p.grad_last_h ? p.grad_last_h + first : nullptr, own);
  load_state(grad_cell, p.grad_last_cell ? p.grad_last_cell + first : nullptr, own);
  clear(grads);
  __syncthreads();
  for (int64_t t = sizes.steps - 1; t >= 0; --t) {
    float gates[4][3], old_cell[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int f = i / 2, r = i % 2;
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        const float2 pair = products[gate][r];
        gates[i][gate] = (f ? pair.y : pair.x) + bias[gate][f];
      }
      old_cell[i] = f ? cells[r].y : cells[r].x;
      grad_h[i] += static_cast<float>(reinterpret_cast<const T(&)[2]>(grad_output[r])[f]);
    }
    if (t > 0) {
      load(t - 1);
    } else {
      load_state(old_cell, p.old_cell + first, own);
    }
    unsigned words[3][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      GateGradients<float> pair[2];
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const int i = 2 * f + r;
        pair[f] = gate_gradients<T>(gates[i], old_cell[i], grad_h[i], grad_cell[i]);
      }
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        words[gate][r] = Packed<T>::pack(pair[0].gate[gate], pair[1].gate[gate]);
        grads[t % 2][gate].store(own.row + r, own.feature / 2, words[gate][r]);
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          grad_bias[gate][f] += own.valid[r] ? pair[f].gate[gate] : 0;
        }
      }
    }
    __syncthreads();
    multiply_gates(grad_h, weights, grads[t % 2]);
    T* to = p.grad_gates + 3 * (t * own.step + first);
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      store_pair(to + own.gates[i / 2][i % 2], words[i / 2][i % 2], own.valid[i % 2]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = first + own.state[i % 2] + i / 2;
    if (own.valid[i % 2] && p.grad_old_h) {
      p.grad_old_h[at] = static_cast<T>(grad_h[i]);
    }
    if (own.valid[i % 2] && p.grad_old_cell) {
      p.grad_old_cell[at] = static_cast<T>(grad_cell[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    float sum = grad_bias[i / 2][i % 2];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (p.grad_bias && lane.t == 0) {
      p.grad_bias[(3 * blockIdx.x + i / 2) * state + own.feature + i % 2] = sum;
    }
  }
}

template <typename T>
auto persistent_kernel(const PersistentForward<T>&, int64_t state) {
  return state <= 64 ? persistent_mma_forward_kernel<T, 4> : persistent_mma_forward_kernel<T, 8>;
}
template <typename T>
auto persistent_kernel(const PersistentBackward<T>&, int64_t state) {
  return state <= 64 ? persistent_mma_backward_kernel<T, 4> : persistent_mma_backward_kernel<T, 8>;
}

}  // namespace ops::cuda
