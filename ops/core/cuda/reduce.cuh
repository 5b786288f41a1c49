// Deterministic two-stage reduction. No atomics: results are bitwise reproducible.
//
//   stage 1   blocks add a split each: reduce_block ─────► sums [splits, size]
//   stage 2   second_stage_kernel: adds the splits in a fixed order ──► write(i, sum)
#pragma once

#include <algorithm>

#include "core/cuda/common.cuh"

namespace ops::cuda {

// Return the shared memory of reduce_block in elements, with `sums` = kSums · V sums per thread.
inline size_t reduction_elements(int lanes, int groups, int sums) {
  return static_cast<size_t>(lanes) * std::max(1, groups / 2) * sums;
}

// Sum over the lanes of the warp; lane 0 gets the totals.
template <int kSums, int V, typename Acc>
__device__ void reduce_warp(Acc (&sum)[kSums][V]) {
#pragma unroll
  for (int i = 0; i < kSums * V; ++i) {
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
      sum[i / V][i % V] += __shfl_down_sync(~0u, sum[i / V][i % V], lanes);
    }
  }
}

// Tree reduction over `groups` groups of `lanes` threads; each thread has kSums sums of each of V
// channels. Afterwards shared[i] is sum i % kSums of the block's channel i / kSums. Call it from
// all threads, when none of them uses `shared`. It lets stage 2 start (trigger_dependent_launch).
template <int kSums, int V, typename Acc>
__device__ void reduce_block(Acc (&sum)[kSums][V], Acc* shared, int lane, int lanes, int group,
                             int groups) {
  trigger_dependent_launch();
  while (groups > 1) {
    const int lower = (groups + 1) / 2, upper = groups - lower;
    const int pitch = upper * lanes;
    Acc* mine = shared + (group < lower ? group : group - lower) * lanes + lane;
    if (lower <= group && group < groups) {
#pragma unroll
      for (int i = 0; i < kSums * V; ++i) {
        mine[i * pitch] = sum[i / V][i % V];
      }
    }
    __syncthreads();
    if (group < upper) {
#pragma unroll
      for (int i = 0; i < kSums * V; ++i) {
        sum[i / V][i % V] += mine[i * pitch];
      }
    }
    __syncthreads();
    groups = lower;
  }
  if (group == 0) {
#pragma unroll
    for (int i = 0; i < kSums * V; ++i) {
      shared[(lane * V + i % V) * kSums + i / V] = sum[i / V][i % V];
    }
  }
  __syncthreads();
}

constexpr int kReduceColumns = 32;

// Stage 2. kRows threads reduce one sum, as a Sum; each adds every kRows-th split.
template <int kRows, typename A, typename Write, typename Sum>
__global__ void __launch_bounds__(kReduceColumns* kRows)
    second_stage_kernel(const A* partial, int splits, int size, Write write) {
  __shared__ Sum sums[kRows][kReduceColumns];
  const int column = threadIdx.x, row = threadIdx.y;
  const int i = blockIdx.x * kReduceColumns + column;
  wait_for_previous_kernel();
  Sum sum{};
  if (i < size) {
#pragma unroll 4  // loads in flight
    for (int s = row; s < splits; s += kRows) {
      sum += partial[static_cast<int64_t>(s) * size + i];
    }
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0 && i < size) {
    for (int r = 1; r < kRows; ++r) {
      sum += sums[r][column];
    }
    write(i, sum);
  }
}

// Run stage 2 on sums [splits, size]. Stage 1 may call trigger_dependent_launch.
template <typename A, typename Write, typename Sum = A>
void second_stage(const A* sums, int64_t splits, int64_t size, const Write& write,
                  cudaStream_t stream) {
  const auto launch = [&](auto rows) {
    launch_dependent(second_stage_kernel<rows.value, A, Write, Sum>, ceil_div(size, kReduceColumns),
                     dim3(kReduceColumns, rows.value), stream, sums, static_cast<int>(splits),
                     static_cast<int>(size), write);
  };
  constexpr int64_t kFewSums = 2048;
  if (splits <= 4) {
    launch(std::integral_constant<int, 4>{});
  } else if (splits <= 64 || size > kFewSums) {
    launch(std::integral_constant<int, 16>{});
  } else {
    launch(std::integral_constant<int, 32>{});
  }
}

}  // namespace ops::cuda
