// Dispatch of the CUDA LLTM:
//
//   operator         sizes                                   kernels
//   cell             N ≤ 32 and 3 S (S + I) ≤ 2¹⁹ weights    small_cell.cuh
//   sequence         T ≥ 2, S ≤ 128 a multiple of 16         persistent_mma.cuh (16 bits),
//                                                            persistent_fma.cuh (float32)
//   cell, sequence   any                                     cuBLAS products and step.cuh
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "core/cuda/common.cuh"
#include "lltm/cuda/persistent_fma.cuh"
#include "lltm/cuda/persistent_mma.cuh"
#include "lltm/cuda/small_cell_backward.cuh"
#include "lltm/sequence.h"

namespace ops::cuda {
namespace {

struct Backend {
  static constexpr bool kFuses = true;

  // Matrix units multiply 16-bit operands directly.
  template <typename T>
  using Operand = T;

  static Tensor operand(const Tensor& x) { return x; }

  // out = a b; float32 out from 16-bit operands if more is to be accumulated.
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

  template <typename T>
  static bool cell_forward(const LltmArguments& a, LltmOutputs& out) {
    if (!is_small(a.sizes)) {
      return false;
    }
    CellForward<T> cell{concat<T>(a), a.weights.template const_data_ptr<T>(),
                        out.products.template mutable_data_ptr<acc_t<T>>()};
    cell.step.products = cell.products;
    cell.step.bias = data_or_null<T>(a.bias);
    cell.step.old_cell.tensor = a.old_cell.template const_data_ptr<T>();
    cell.step.new_cell.tensor = out.last_cell.template mutable_data_ptr<T>();
    cell.step.new_h = out.output.template mutable_data_ptr<T>();
    launch_cell(a.input, a.sizes, cell);
    return true;
  }

  template <typename T>
  static bool cell_backward(const LltmArguments& a, const LltmGradients& grads,
                            const Tensor& products, const FiveTensors& results) {
    // float64: the gates' gradients need 96 S bytes of shared memory, beside 19 KB of static.
    constexpr int64_t kMaxState = sizeof(T) == 8 ? 300 : kMaxCellWeights;
    if (!is_small(a.sizes) || a.sizes.state > kMaxState) {
      return false;
    }
    using A = acc_t<T>;
    const auto& [input, weights, bias, old_h, old_cell] = results;
    CellBackward<T> cell{concat<T>(a),
                         a.weights.template const_data_ptr<T>(),
                         data_unless_empty<T>(input),
                         data_unless_empty<T>(weights),
                         data_unless_empty<T>(bias),
                         data_unless_empty<T>(old_h)};
    cell.step.products = products.template const_data_ptr<A>();
    cell.step.bias = data_or_null<T>(a.bias);
    cell.step.old_cell.tensor = a.old_cell.template const_data_ptr<T>();
    cell.step.grad_h.tensor = data_or_null<T>(grads.output);
    cell.step.grad_cell.tensor = data_or_null<T>(grads.last_cell);
    cell.step.grad_old_cell.tensor = data_unless_empty<T>(old_cell);
    launch_cell(a.input, a.sizes, cell);
    return true;
  }

  // All steps after the products with x.
  template <typename T>
  static bool sequence_forward(const LltmArguments& a, LltmOutputs& out) {
    const DeviceGuard guard(a.input.get_device_index());
    if (!out.last_h || persistent_blocks<T>(a.sizes) == 0) {
      return false;
    }
    run_persistent<T>(
        a, PersistentForward<T>{a.weights.template const_data_ptr<T>(), data_or_null<T>(a.bias),
                                a.old_h.template const_data_ptr<T>(),
                                a.old_cell.template const_data_ptr<T>(),
                                out.products.template mutable_data_ptr<acc_t<T>>(),
                                out.output.template mutable_data_ptr<T>(),
                                out.last_h->template mutable_data_ptr<T>(),
                                out.last_cell.template mutable_data_ptr<T>()});
    return true;
  }

  // Gradients of the gates, bias, old_h and old_cell. `cells`: of all steps but the last.
  template <typename T>
  static bool sequence_backward(const LltmArguments& a, const LltmGradients& grads,
                                const Tensor& products, const std::optional<Tensor>& cells,
                                const Tensor& gates, Tensor& grad_bias, const Tensor& grad_old_h,
                                const Tensor& grad_old_cell) {
    using A = acc_t<T>;
    const DeviceGuard guard(a.input.get_device_index());
    const int64_t blocks = persistent_blocks<T>(a.sizes), columns = 3 * a.sizes.state;
    const bool need_bias = grad_bias.numel() > 0;
    if (!cells || blocks == 0 ||
        !are_aligned({products.template const_data_ptr<A>()}, 2 * sizeof(A))) {  // loaded in pairs
      return false;
    }
    std::optional<Tensor> bias_sums;
    if (need_bias) {
      bias_sums = empty(a.input, {blocks, columns}, accumulator_dtype(a.input.scalar_type()));
    }
    run_persistent<T>(
        a, PersistentBackward<T>{
               a.weights.template const_data_ptr<T>(), data_or_null<T>(a.bias),
               a.old_cell.template const_data_ptr<T>(), products.template const_data_ptr<A>(),
               cells->template const_data_ptr<A>(), data_or_null<T>(grads.output),
               data_or_null<T>(grads.last_h), data_or_null<T>(grads.last_cell),
               gates.template mutable_data_ptr<T>(), data_unless_empty<T>(grad_old_h),
               data_unless_empty<T>(grad_old_cell),
               need_bias ? bias_sums->template mutable_data_ptr<A>() : nullptr});
    if (need_bias) {
      launch_kernel(bias_gradient_kernel<T>, dim3(ceil_div(columns, 32)), dim3(32, 32), 0,
                    current_stream(a.input), bias_sums->template const_data_ptr<A>(), blocks,
                    static_cast<int>(columns), grad_bias.template mutable_data_ptr<T>());
    }
    return true;
  }

  // Run a forward step, a backward step or a scan.
  template <typename Step>
  static void run(const Tensor& like, const LltmSizes& sizes, const Step& step) {
    if (sizes.batch == 0 || sizes.state == 0) {
      return;
    }
    const DeviceGuard guard(like.get_device_index());
    const LltmGrid grid(sizes);
    launch_kernel(lltm_kernel<Step>, grid.blocks, grid.threads, 0, current_stream(like), step,
                  sizes);
  }

  template <typename T>
  static void sum_rows(const Tensor& x, int64_t rows, int64_t columns, Tensor& out) {
    const std::vector<int64_t> first{0};
    torch::stable::sum_out(out, x, torch::headeronly::IntHeaderOnlyArrayRef(first), false);
  }

 private:
  template <typename T, typename Arguments>
  static void run_persistent(const LltmArguments& a, const Arguments& arguments) {
    if constexpr (sizeof(T) <= 4) {
      launch_kernel(persistent_kernel(arguments, a.sizes.state),
                    dim3(persistent_blocks<T>(a.sizes)), dim3(2 * a.sizes.state), 0,
                    current_stream(a.input), arguments, a.sizes);
    }
  }

  template <typename T>
  static ConcatInput<T> concat(const LltmArguments& a) {
    return {a.old_h.template const_data_ptr<T>(), a.input.template const_data_ptr<T>(),
            static_cast<int>(a.sizes.state), static_cast<int>(a.sizes.input)};
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lenet_ops, CUDA, m) {
  m.impl("lltm_cell", TORCH_BOX(&lltm_cell<Backend>));
  m.impl("lltm_cell_backward", TORCH_BOX(&lltm_cell_backward<Backend>));
  m.impl("lltm", TORCH_BOX(&lltm<Backend>));
  m.impl("lltm_backward", TORCH_BOX(&lltm_sequence_backward<Backend>));
}

}  // namespace ops::cuda
