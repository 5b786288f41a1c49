// Vector kernels of exp. No include guard: see core/cpu/dispatch_isa.h.

#include "core/cpu/elementwise_kernels.h"
#include "core/cpu/vec_exp.h"

namespace ops::cpu::OPS_ISA {

template <>
struct OnVectors<ExpForward> {
  template <typename A, int N>
  static Vec<A, N> apply(Vec<A, N> x) {
    return exp<A, N>(x);
  }
};

template <>
struct OnVectors<ExpBackward> {
  template <typename A, int N>
  static Vec<A, N> apply(Vec<A, N> grad_output, Vec<A, N> output) {
    return grad_output * output;
  }
};

}  // namespace ops::cpu::OPS_ISA
