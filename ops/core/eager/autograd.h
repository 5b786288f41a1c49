// Autograd in C++: executes the gradient formulas of ops/core/formula.py.
//
// register_autograd takes the operator to record (usually the operator itself), the backward
// operator, and the source of each argument of the backward operator. Python handles forward mode,
// torch.func's transforms and double backward. The stable ABI has no autograd: this library is
// loaded only with the PyTorch that it was built with, and contains no kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/eager/memory.h"

namespace ops {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::FunctionSchema;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Source of one argument of the backward operator. Tensors are saved by save_for_backward, other
// values in saved_data.
struct Source {
  enum Kind { grad, mask, tensor, constant, output, height, width, channels_last } kind;
  size_t index;
};

struct Formula {
  OperatorHandle backward;
  std::vector<Source> sources;
  size_t grads = 0;             // leading outputs of the forward operator that have gradients
  std::vector<size_t> tensors;  // arguments of the forward operator that are tensors
};

inline bool takes_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

inline Source::Kind kind_of(const std::string& name, const c10::Argument* argument) {
  static const std::map<std::string, Source::Kind> kinds{
      {"grad", Source::grad},     {"mask", Source::mask},
      {"output", Source::output}, {"height", Source::height},
      {"width", Source::width},   {"channels_last", Source::channels_last}};
  if (name == "argument") {
    return takes_tensor(*argument) ? Source::tensor : Source::constant;
  }
  return kinds.at(name);
}

inline IValue image_property(Source::Kind kind, const at::Tensor& image) {
  switch (kind) {
    case Source::height: return image.sym_size(-2);
    case Source::width: return image.sym_size(-1);
    default: return image.suggest_memory_format() != at::MemoryFormat::Contiguous;
  }
}

inline at::Tensor to_tensor(const IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

inline IValue to_value(const at::Tensor& x) {
  return x.defined() ? IValue(x) : IValue();
}

inline void call_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Arguments of Operator::forward.
struct Call {
  const Formula& formula;
  const OperatorHandle& op;
  DispatchKeySet keys;
  Stack* stack;  // the arguments, then the outputs
};

struct Operator : torch::autograd::Function<Operator> {
  static constexpr bool is_traceable = true;  // by compiled autograd
  // Key of one list in saved_data: address of the Formula (never freed), one bool per tensor
  // argument (given or not), then the constants.
  static constexpr const char* kSaved = "saved";

  // Run the operator and return its differentiable outputs. PyTorch connects them to `tensors`.
  static variable_list forward(AutogradContext* ctx, const Call& call, at::TensorList tensors) {
    const auto& schema = call.op.schema();
    const auto last = torch::jit::last(*call.stack, schema.arguments().size());
    const Stack arguments(last.begin(), last.end());
    call_below_autograd(call.op, call.keys, call.stack);
    const auto outputs = torch::jit::last(*call.stack, schema.returns().size());

    variable_list saved;
    c10::List<IValue> values(c10::AnyType::get());
    values.push_back(reinterpret_cast<int64_t>(&call.formula));
    for (const size_t i : call.formula.tensors) {
      values.push_back(arguments[i].isTensor());
    }
    for (const auto& [kind, i] : call.formula.sources) {
      switch (kind) {
        case Source::grad:
        case Source::mask: break;
        case Source::tensor: saved.push_back(to_tensor(arguments[i])); break;
        case Source::output: saved.push_back(to_tensor(outputs[i])); break;
        case Source::constant: values.push_back(arguments[i]); break;
        default: values.push_back(image_property(kind, arguments[i].toTensor()));
      }
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data[kSaved] = std::move(values);

    variable_list differentiable;
    for (size_t i = 0; i < call.formula.grads; ++i) {
      differentiable.push_back(outputs[i].toTensor());
    }
    return differentiable;
  }

  // Return an undefined gradient for `call`, then one gradient per given tensor.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const c10::ArrayRef<IValue> values = ctx->saved_data[kSaved].toListRef();
    const auto& formula = *reinterpret_cast<const Formula*>(values[0].toInt());
    const auto given = values.slice(1, formula.tensors.size());
    c10::List<bool> mask;
    size_t count = 0;
    for (const IValue& is_given : given) {
      mask.push_back(is_given.toBool() && ctx->needs_input_grad(count));
      count += is_given.toBool();
    }
    variable_list gradients(1 + count);
    if (std::none_of(grads.begin(), grads.end(), [](const auto& x) { return x.defined(); })) {
      return gradients;
    }

    Stack stack;
    const variable_list saved = ctx->get_saved_variables();
    size_t next_saved = 0, next_constant = 1 + given.size();
    for (const auto& [kind, i] : formula.sources) {
      switch (kind) {
        case Source::grad: stack.push_back(to_value(grads[i])); break;
        case Source::mask: stack.emplace_back(mask); break;
        case Source::tensor:
        case Source::output: stack.push_back(to_value(saved[next_saved++])); break;
        default: stack.push_back(values[next_constant++]);
      }
    }
    formula.backward.callBoxed(stack);

    for (size_t i = 0, to = 1; i < mask.size(); ++i) {
      if (mask[i]) {
        gradients[to] = stack[i].toTensor();
      }
      to += given[i].toBool();
    }
    return gradients;
  }
};

// Autograd kernel of an operator: records a node, or redispatches if no gradient is required.
class Recorder : public c10::OperatorKernel {
 public:
  // `recorded` replaces the operator if a gradient is required.
  Recorder(OperatorHandle recorded, std::optional<Formula> formula)
      : recorded_(std::move(recorded)), formula_(std::move(formula)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    bool requires_grad = false;
    bool handled_by_python = is_transformed();
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    for (const IValue& value : arguments) {
      if (value.isTensor()) {
        const at::Tensor& x = value.toTensor();
        requires_grad |= x.requires_grad();
        handled_by_python |= x._fw_grad(/*level=*/0).defined();
      }
    }
    requires_grad &= at::GradMode::is_enabled();
    if (handled_by_python || (requires_grad && !formula_)) {
      // Python registers for the alias key Autograd; AutogradOther selects its kernel.
      op.redispatchBoxed(DispatchKeySet(DispatchKey::AutogradOther), stack);
    } else if (!requires_grad) {
      call_below_autograd(op, keys, stack);
    } else {
      const Call call{*formula_, recorded_, keys, stack};
      variable_list tensors;
      for (const IValue& value : arguments) {
        if (value.isTensor()) {
          tensors.push_back(value.toTensor());
        }
      }
      const variable_list outputs = Operator::apply(call, at::TensorList(tensors));
      const size_t returned = recorded_.schema().returns().size();
      std::copy(outputs.begin(), outputs.end(), stack->end() - returned);
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

inline Formula make_formula(const FunctionSchema& forward, const std::string& backward,
                            const std::vector<std::string>& kinds,
                            const std::vector<int64_t>& indices) {
  Formula formula{find(backward), {}, 0, {}};
  const auto& arguments = forward.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (takes_tensor(arguments[i])) {
      formula.tensors.push_back(i);
    }
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const size_t index = indices[i];
    const auto kind = kind_of(kinds[i], index < arguments.size() ? &arguments[index] : nullptr);
    formula.sources.push_back({kind, index});
    if (kind == Source::grad) {
      formula.grads = std::max(formula.grads, index + 1);
    }
  }
  return formula;
}

// Register a gradient formula. Python has checked it against the schemas. If `backward` is empty,
// Python computes the gradients.
inline void register_autograd(const std::string& name, const std::string& recorded,
                              const std::string& backward, const std::vector<std::string>& kinds,
                              const std::vector<int64_t>& indices) {
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
      formula = make_formula(op.schema(), backward, kinds, indices);
    }
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                   std::make_unique<Recorder>(op, std::move(formula))));
  }
}

}  // namespace ops
