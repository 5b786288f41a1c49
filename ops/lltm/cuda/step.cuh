// CUDA step of the LLTM.
//
//   block:   256 elements: adjacent features, several rows of the batch if S < 256
//   shared:  nothing
//   thread:  one element (row, feature): three gates, cell and h
#pragma once

#include <algorithm>

#include "core/cuda/common.cuh"
#include "lltm/op.h"

namespace ops::lltm {

using namespace ops::cuda;

// exp(x) and exp(x) − 1
template <typename V>
struct Exponential {
  V exp, minus_one;

  OPS_FORMULA explicit Exponential(V x) : exp(std::exp(x)), minus_one(std::expm1(x)) {}
};

struct ElementPosition : Position {
  template <typename T>
  OPS_FORMULA acc_t<T> load(const T* p) const {
    return static_cast<acc_t<T>>(*p);
  }
  template <typename T, typename A>
  OPS_FORMULA void store(T* p, A value) const {
    *p = static_cast<T>(value);
  }
};

#include "lltm/step.h"

constexpr int kThreads = 256;

// Block of columns × rows of threads: up to 256 features, several rows of the batch if fewer.
struct Grid {
  dim3 blocks, threads;

  explicit Grid(const Sizes& sizes) {
    unsigned columns = 1;
    while (columns < kThreads && columns < sizes.state) {
      columns *= 2;
    }
    threads = dim3(columns, kThreads / columns);
    blocks = dim3(ceil_div(sizes.batch, threads.y),
                  std::min<int64_t>(ceil_div(sizes.state, threads.x), 65535));
  }
};

template <typename Step>
__global__ void __launch_bounds__(kThreads) step_kernel(Step step, Sizes sizes) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= sizes.batch) {
    return;
  }
  for (int64_t column = blockIdx.y * blockDim.x + threadIdx.x; column < sizes.state;
       column += static_cast<int64_t>(gridDim.y) * blockDim.x) {
    run(step, ElementPosition{{sizes.state, row, column}});
  }
}

}  // namespace ops::lltm
