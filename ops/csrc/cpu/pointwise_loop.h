// The CPU loop behind every elementwise operator.
#pragma once

#include "pointwise.h"

namespace ops::cpu {

constexpr int64_t kGrain = 16384;  // elements: less is not worth waking a thread for

struct PointwiseLoop {
  // out[i] = f(in[i]...) in acc_t<T>; all laid out as `like`, which is dense.
  template <typename T, typename F, typename... In>
  static void run(const Tensor& like, T* out, const F& f, const In*... in) {
    torch::stable::parallel_for(0, like.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = static_cast<T>(f(static_cast<acc_t<T>>(in[i])...));
      }
    });
  }
};

}  // namespace ops::cpu
