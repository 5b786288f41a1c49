// Multithreaded CPU loop of elementwise operators. Include after dispatch_isa.h.
#pragma once

#include "core/cpu/parallel.h"
#include "core/elementwise.h"

namespace ops::cpu {

constexpr int64_t kGrain = 32768;  // minimum elements per thread

struct PointwiseLoop {
  // Compute out[i] = F(in[i]...). All tensors are dense, with the layout of `like`.
  template <typename T, typename F, typename... In>
  static void run(const Tensor& like, T* out, const F&, const In*... in) {
    parallel_for(0, like.numel(), kGrain, [&](int64_t begin, int64_t end) {
      OPS_CALL(map<F>(out + begin, end - begin, (in + begin)...));
    });
  }
};

}  // namespace ops::cpu
