// Arguments of the kernels that run a whole sequence: persistent_mma.cuh, persistent_fma.cuh.
#pragma once

#include "lltm/cuda/step.cuh"

namespace ops::cuda {

constexpr int kPersistentThreads = 256;
constexpr int kFmaRows = 2, kMmaRows = 8;  // of the batch per block
constexpr int64_t kPersistentState = 128;  // largest S: the weights of h fit the registers

// Contiguous tensors, as in LltmForward.
template <typename T>
struct PersistentForward {
  const T *weights, *bias, *old_h, *old_cell;
  acc_t<T>* products;  // receives x · weights_xᵀ + h · weights_hᵀ in place of the first term
  T *output, *last_h, *last_cell;
};

// Contiguous tensors, as in LltmBackward.
template <typename T>
struct PersistentBackward {
  const T *weights, *bias, *old_cell;
  const acc_t<T>*products, *cells;
  const T *grad_output, *grad_last_h, *grad_last_cell;  // or null
  T *grad_gates, *grad_old_h, *grad_old_cell;           // the last two or null
  acc_t<T>* grad_bias;                                  // [blocks, 3S], sums of each block; or null
};

// Return the blocks of the kernels, or 0 if they do not cover these sizes in dtype T.
template <typename T>
int64_t persistent_blocks(const LltmSizes& sizes) {
  const bool fits = sizes.steps > 1 && sizes.batch > 0 && sizes.state > 0 &&
                    sizes.state % 16 == 0 && sizes.state <= kPersistentState;
  if (!fits || sizeof(T) > 4 || (sizeof(T) == 2 && !has_mma())) {
    return 0;
  }
  return ceil_div(sizes.batch, sizeof(T) == 4 ? kFmaRows : kMmaRows);
}

template <typename T>
__device__ acc_t<T> load_or_zero(const T* from, int64_t i) {
  return from ? static_cast<acc_t<T>>(from[i]) : acc_t<T>(0);
}

// Load the biases of N features per gate.
template <int N, typename T>
__device__ void load_bias(float (&bias)[3][N], const T* from, int state, int feature) {
#pragma unroll
  for (int i = 0; i < 3 * N; ++i) {
    bias[i / N][i % N] = load_or_zero(from, i / N * state + feature + i % N);
  }
}

// Clear shared memory.
template <typename X>
__device__ void clear(X& x) {
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(X) / sizeof(uint4)); i += blockDim.x) {
    reinterpret_cast<uint4*>(&x)[i] = {};
  }
}

// Add the sums of all blocks in a fixed order: 32 columns × 32 ranges of blocks per block.
template <typename T>
__global__ void __launch_bounds__(1024)
    bias_gradient_kernel(const acc_t<T>* sums, int64_t blocks, int columns, T* out) {
  __shared__ acc_t<T> partial[32][32];
  const int column = blockIdx.x * 32 + threadIdx.x;
  acc_t<T> sum = 0;
  for (int64_t i = threadIdx.y; column < columns && i < blocks; i += 32) {
    sum += sums[i * columns + column];
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int i = 1; i < 32; ++i) {
      sum += partial[i][threadIdx.x];
    }
    out[column] = static_cast<T>(sum);
  }
}

}  // namespace ops::cuda
