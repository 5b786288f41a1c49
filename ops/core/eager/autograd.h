// Autograd in C++: calls the backward operators of ops/core/gradient.py.
//
// Python computes forward mode, torch.func's transforms and double backward. The stable ABI has no
// autograd, so this library uses ATen, and is loaded only with the PyTorch that it was built with.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/eager/gradient.h"
#include "core/eager/memory.h"

namespace ops {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Return whether the operator writes to an argument, as to Tensor(a!).
inline bool is_mutable(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

inline void call_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Autograd kernel of an operator: adds a node to the graph if a gradient is required.
class AutogradKernel : public c10::OperatorKernel {
 public:
  // If a gradient is required, `variant` is called instead of the operator. Its additional outputs
  // are saved for backward and not returned.
  AutogradKernel(OperatorHandle variant, std::optional<BackwardCall> call)
      : variant_(std::move(variant)), backward_(std::move(call)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    bool requires_grad = false;
    bool in_python = is_transformed();
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].isTensor()) {
        const at::Tensor& x = arguments[i].toTensor();
        if (x.requires_grad() && at::GradMode::is_enabled()) {
          const c10::Argument& argument = op.schema().arguments()[i];
          TORCH_CHECK(!is_mutable(argument), op.schema().name(),
                      " is not differentiable with respect to argument '", argument.name(), "'");
          requires_grad = true;
        }
        in_python |= x._fw_grad(/*level=*/0).defined();
      }
    }
    if (in_python || (requires_grad && !backward_)) {
      // Python's kernel is registered for the alias key Autograd, which AutogradOther reaches.
      op.redispatchBoxed(DispatchKeySet(DispatchKey::AutogradOther), stack);
    } else if (!requires_grad) {
      call_below_autograd(op, keys, stack);
    } else {
      const auto node = make_node(*backward_);
      node->save_arguments(arguments);
      call_below_autograd(variant_, keys, stack);
      const size_t count = variant_.schema().returns().size();
      const auto outputs = torch::jit::last(*stack, count);
      for (size_t i = 0; i < backward_->grads; ++i) {
        torch::autograd::set_history(outputs[i].toTensor(), node);
      }
      node->save_outputs(outputs);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)  // new in torch 2.14
      torch::autograd::fire_node_creation_hooks(node);
#endif
      torch::jit::drop(*stack, count - op.schema().returns().size());
    }
  }

 private:
  // Return whether a torch.func transform is active.
  static bool is_transformed() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           included.has(DispatchKey::FuncTorchDynamicLayerBackMode);
  }

  OperatorHandle variant_;
  std::optional<BackwardCall> backward_;
};

// Register an operator's autograd kernel (AutogradKernel) and its BackendSelect kernel (memory.h).
//
// `variant` is the operator that autograd calls, usually the operator itself; `backward` its
// backward operator (nullopt: Python computes gradients), whose arguments have the sources `kinds`
// and `indices`; `tensors` are BackwardCall::tensors. Python has checked the schemas.
inline void register_autograd(const std::string& name, const std::string& variant,
                              const std::optional<std::string>& backward, const std::string& kinds,
                              const std::vector<int64_t>& indices,
                              const std::vector<int64_t>& tensors) {
  static torch::Library libraries[] = {
      {torch::Library::IMPL, "lenet_ops", DispatchKey::AutogradCPU, __FILE__, __LINE__},
      {torch::Library::IMPL, "lenet_ops", DispatchKey::AutogradCUDA, __FILE__, __LINE__},
  };
  static torch::Library backends(torch::Library::IMPL, "lenet_ops", DispatchKey::BackendSelect,
                                 __FILE__, __LINE__);
  backends.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_kernel>());
  const auto find = [](const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(("lenet_ops::" + name).c_str(), "");
  };
  std::optional<BackwardCall> call;
  if (backward) {
    call = BackwardCall{find(*backward), {}, {tensors.begin(), tensors.end()}, 0};
    for (size_t i = 0; i < kinds.size(); ++i) {
      call->sources.push_back({Source::Kind(kinds[i]), static_cast<size_t>(indices[i])});
      call->grads += kinds[i] == Source::grad;
    }
  }
  for (torch::Library& library : libraries) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                   std::make_unique<AutogradKernel>(find(variant), call)));
  }
}

}  // namespace ops
