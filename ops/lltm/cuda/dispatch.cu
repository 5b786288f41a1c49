// CUDA LLTM: cuBLAS matrix products, and elementwise steps after them (step.cuh).
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "core/cuda/common.cuh"
#include "lltm/cuda/step.cuh"
#include "lltm/sequence.h"

namespace ops::lltm {
namespace {

struct Backend {
  // Matrix units multiply 16-bit operands directly.
  template <typename T>
  using Operand = T;

  static Tensor operand(const Tensor& x) { return x; }

  // out = a b; out may be float32 for 16-bit operands.
  static void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
    if (out.scalar_type() == a.scalar_type()) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(out.get(), a.get(), b.get()));
      return;
    }
    std::array<StableIValue, 4> stack{
        torch::stable::detail::from(a), torch::stable::detail::from(b),
        torch::stable::detail::from(out.scalar_type()), torch::stable::detail::from(out)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::mm", "dtype_out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // takes ownership of the result
  }

  // out = out + a b
  static void accumulate(const Tensor& out, const Tensor& a, const Tensor& b) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_cuda_addmm_out(out.get(), out.get(), a.get(), b.get(), 1, 1));
  }

  // Run a forward or backward step.
  template <typename Step>
  static void run(const Tensor& like, const Sizes& sizes, const Step& step) {
    if (const int64_t elements = sizes.batch * sizes.state; elements > 0) {
      const DeviceGuard guard(like.get_device_index());
      launch_kernel(step_kernel<Step>, ceil_div(elements, kThreads), kThreads, 0,
                    current_stream(like), step, sizes);
    }
  }

  template <typename T>
  static void sum_rows(const Tensor& x, int64_t rows, int64_t columns, Tensor& out) {
    const std::vector<int64_t> first{0};
    torch::stable::sum_out(out, x, torch::headeronly::IntHeaderOnlyArrayRef(first), false);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("lltm", TORCH_BOX(&forward<Backend>));
  m.impl("lltm_backward", TORCH_BOX(&backward<Backend>));
}

}  // namespace ops::lltm
