// Autograd in C++: executes the gradient formulas of ops/core/formula.py.
//
// register_autograd takes the recorded operator (usually the operator itself), the backward
// operator, and the source of each argument of the backward operator. Python handles forward mode,
// torch.func's transforms and double backward. The stable ABI has no autograd. This library
// therefore uses ATen, is loaded only with the PyTorch that it was built with, and contains no
// device kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <map>
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

// Return the kind of a formula's term by its name in formula.py.
inline Source::Kind kind_of(const std::string& name) {
  static const std::map<std::string, Source::Kind> kinds{
      {"grad", Source::grad},     {"mask", Source::mask},
      {"tensor", Source::tensor}, {"constant", Source::constant},
      {"output", Source::output}, {"height", Source::height},
      {"width", Source::width},   {"channels_last", Source::channels_last}};
  return kinds.at(name);
}

inline void call_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Autograd kernel of an operator: records a node, or redispatches if no gradient is required.
class Recorder : public c10::OperatorKernel {
 public:
  // If a gradient is required, call `recorded` instead of the operator. Its additional outputs are
  // saved for backward and not returned.
  Recorder(OperatorHandle recorded, std::optional<Formula> formula)
      : recorded_(std::move(recorded)), formula_(std::move(formula)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    bool requires_grad = false;
    bool handled_by_python = is_transformed();
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
        handled_by_python |= x._fw_grad(/*level=*/0).defined();
      }
    }
    if (handled_by_python || (requires_grad && !formula_)) {
      // Python registers for the alias key Autograd; AutogradOther selects its kernel.
      op.redispatchBoxed(DispatchKeySet(DispatchKey::AutogradOther), stack);
    } else if (!requires_grad) {
      call_below_autograd(op, keys, stack);
    } else {
      const auto node = make_node(*formula_);
      node->save_arguments(arguments);
      call_below_autograd(recorded_, keys, stack);
      const size_t returned = recorded_.schema().returns().size();
      const auto outputs = torch::jit::last(*stack, returned);
      for (size_t i = 0; i < formula_->grads; ++i) {
        torch::autograd::set_history(outputs[i].toTensor(), node);
      }
      node->save_outputs(outputs);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)  // new in torch 2.14
      torch::autograd::fire_node_creation_hooks(node);
#endif
      torch::jit::drop(*stack, returned - op.schema().returns().size());
    }
  }

 private:
  // Return whether a torch.func transform is active.
  static bool is_transformed() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           included.has(DispatchKey::FuncTorchDynamicLayerBackMode);
  }

  OperatorHandle recorded_;
  std::optional<Formula> formula_;
};

inline OperatorHandle find(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("lenet_ops::" + name).c_str(), "");
}

inline Formula make_formula(const std::string& backward, const std::vector<std::string>& kinds,
                            const std::vector<int64_t>& indices,
                            const std::vector<int64_t>& tensors) {
  Formula formula{find(backward), {}, 0, {tensors.begin(), tensors.end()}, 0};
  for (size_t i = 0; i < kinds.size(); ++i) {
    const Source source{kind_of(kinds[i]), static_cast<size_t>(indices[i])};
    formula.sources.push_back(source);
    formula.saved_arguments += source.kind == Source::tensor;
    if (source.kind == Source::grad) {
      formula.grads = std::max(formula.grads, source.index + 1);
    }
  }
  return formula;
}

// Register an operator's autograd kernel (Recorder) and its BackendSelect kernel (memory.h). Python
// has checked the formula against the schemas. If `backward` is empty, Python computes gradients.
inline void register_autograd(const std::string& name, const std::string& recorded,
                              const std::string& backward, const std::vector<std::string>& kinds,
                              const std::vector<int64_t>& indices,
                              const std::vector<int64_t>& tensors) {
  static torch::Library libraries[] = {
      {torch::Library::IMPL, "lenet_ops", DispatchKey::AutogradCPU, __FILE__, __LINE__},
      {torch::Library::IMPL, "lenet_ops", DispatchKey::AutogradCUDA, __FILE__, __LINE__},
  };
  static torch::Library backends(torch::Library::IMPL, "lenet_ops", DispatchKey::BackendSelect,
                                 __FILE__, __LINE__);
  backends.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_kernel>());
  const OperatorHandle op = find(recorded);
  for (torch::Library& library : libraries) {
    std::optional<Formula> formula;
    if (!backward.empty()) {
      formula = make_formula(backward, kinds, indices, tensors);
    }
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                   std::make_unique<Recorder>(op, std::move(formula))));
  }
}

}  // namespace ops
