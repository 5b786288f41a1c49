// Multithreaded CPU loop of elementwise operators.
#pragma once

#include "core/cpu/parallel.h"
#include "core/elementwise.h"

#define OPS_KERNELS "core/cpu/elementwise_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::cpu {

constexpr int64_t kGrain = 32768;  // minimum elements per thread

struct Loop {
  // Compute out[i] = f(in[i]...). All tensors are dense, with the layout of `like`.
  template <typename T, typename F, typename... In>
  static void run(const Tensor& like, T* out, const F& f, const In*... in) {
    parallel_for(0, like.numel(), kGrain, [&](int64_t begin, int64_t end) {
      OPS_CALL(map(out + begin, end - begin, f, (in + begin)...));
    });
  }
};

using Elementwise = ops::Elementwise<Loop>;

}  // namespace ops::cpu
