// CPU LLTM: BLAS matrix products and vector steps (cpu_kernels.h), threads over rows of the batch.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>

#include "core/cpu/parallel.h"
#include "lltm/sequence.h"

#define OPS_KERNELS "lltm/cpu_kernels.h"
#include "core/cpu/dispatch_isa.h"

namespace ops::lltm {
namespace {

constexpr int64_t kGrain = 8192;  // elements per thread, minimum

struct Backend {
  // Matrix products of 16-bit tensors run in float32.
  template <typename T>
  using Operand = acc_t<T>;

  static Tensor operand(const Tensor& x) { return to_dtype(x, accumulator_dtype(x.scalar_type())); }

  // out = a b
  static void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
  }

  // out = out + a b
  static void accumulate(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1, 1));
  }

  // Run a forward or backward step.
  template <typename Step>
  static void run(const Tensor&, const Sizes& sizes, const Step& step) {
    cpu::parallel_for(
        0, sizes.batch, kGrain / std::max<int64_t>(1, sizes.state) + 1,
        [&](int64_t begin, int64_t end) { OPS_CALL(lltm::run_rows(step, sizes, begin, end)); });
  }

  template <typename T>
  static void sum_rows(const Tensor& x, int64_t rows, int64_t columns, const Tensor& out) {
    using A = acc_t<T>;
    std::vector<A> sums(columns);
    const A* p = x.const_data_ptr<A>();
    constexpr int64_t kVector = 16;  // lanes of the widest vector
    cpu::parallel_for(0, (columns + kVector - 1) / kVector, kGrain / std::max<int64_t>(1, rows) + 1,
                      [&](int64_t begin, int64_t end) {
                        OPS_CALL(lltm::sum_rows(p, rows, columns, begin * kVector,
                                                std::min(end * kVector, columns), sums.data()));
                      });
    std::copy(sums.begin(), sums.end(), out.mutable_data_ptr<T>());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lenet_ops, m) {
  m.def(
      "lltm(Tensor sequence, Tensor weights, Tensor? bias, Tensor h0, Tensor c0) -> "
      "(Tensor output, Tensor h_n, Tensor c_n, Tensor saved)");
  m.def(
      "lltm_backward(Tensor? grad_output, Tensor? grad_h, Tensor? grad_cell, Tensor sequence, "
      "Tensor weights, Tensor? bias, Tensor h0, Tensor c0, Tensor output, Tensor saved, "
      "bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CPU, m) {
  m.impl("lltm", TORCH_BOX(&forward<Backend>));
  m.impl("lltm_backward", TORCH_BOX(&backward<Backend>));
}

}  // namespace ops::lltm
