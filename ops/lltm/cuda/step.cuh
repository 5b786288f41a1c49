// CUDA step of the LLTM.
//
//   block:   256 adjacent elements
//   shared:  nothing
//   thread:  one element (row, feature): three gates, cell and h
#pragma once

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

template <typename Step>
__global__ void __launch_bounds__(kThreads) step_kernel(Step step, Sizes sizes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / sizes.state;
  if (row < sizes.batch) {
    run(step, ElementPosition{{sizes.state, row, i - row * sizes.state}});
  }
}

}  // namespace ops::lltm
