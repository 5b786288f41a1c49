// Records operators for autograd without Python: what ops/core/library.py registers, in the usual
// case.
//
// Nothing here is about one operator. `x` is recorded if there is an `x_backward` that returns a
// gradient for each tensor that x takes, and whose arguments are, by their names,
//   grad_...       in front: the gradients of as many of x's first outputs,
//   ...            arguments or outputs of x; an output without a name is called `output`,
//   output_mask    which gradients are wanted,
//   height, width, channels_last   those of x's first argument, an image.
// Where x's gradient needs more than x's arguments and outputs, an `x_with_...` that takes the same
// returns that after x's outputs: it runs, and is recorded, in the place of x.
// All else (forward mode, torch.func's transforms, gradients of gradients) is left to Python. The
// stable ABI knows no autograd, so this library, which has no kernels, is loaded only beside the
// PyTorch that it was built with.
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

namespace ops {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::FunctionSchema;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Where an argument of the backward operator comes from. Tensors are saved as autograd saves them.
struct Source {
  enum Kind { grad, mask, argument, constant, output, height, width, channels_last } kind;
  size_t index = 0;
};

// A backward operator, and how it is called.
struct Backward {
  OperatorHandle op;
  std::vector<Source> sources;  // of its arguments
  size_t grads;                 // how many outputs of the forward operator have gradients
  std::vector<size_t> tensors;  // which arguments of the forward operator get them
};

inline bool takes_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

inline std::optional<size_t> find(const std::vector<c10::Argument>& list, const std::string& name) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].name() == name) {
      return i;
    }
  }
  return std::nullopt;
}

inline std::optional<Source> source_of(const std::string& name, const FunctionSchema& forward) {
  if (const auto i = find(forward.arguments(), name)) {
    return Source{takes_tensor(forward.arguments()[*i]) ? Source::argument : Source::constant, *i};
  }
  if (const auto i = find(forward.returns(), name)) {
    return Source{Source::output, *i};
  }
  if (name == "output" && forward.returns().size() == 1) {
    return Source{Source::output};
  }
  static const std::map<std::string, Source::Kind> kinds{{"output_mask", Source::mask},
                                                         {"height", Source::height},
                                                         {"width", Source::width},
                                                         {"channels_last", Source::channels_last}};
  const auto kind = kinds.find(name);
  return kind != kinds.end() ? std::optional(Source{kind->second}) : std::nullopt;
}

inline IValue of_image(Source::Kind kind, const at::Tensor& image) {
  switch (kind) {
    case Source::height: return image.sym_size(-2);
    case Source::width: return image.sym_size(-1);
    default: return image.suggest_memory_format() != at::MemoryFormat::Contiguous;
  }
}

// The operator that is recorded in the place of another: if there is none that returns more,
// itself.
inline OperatorHandle recorded_for(const OperatorHandle& op,
                            const std::vector<c10::OperatorName>& operators) {
  const std::string prefix = op.schema().name() + "_with_";
  for (const c10::OperatorName& name : operators) {
    if (name.name.rfind(prefix, 0) == 0) {
      const auto other = c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), "");
      if (other.schema().arguments() == op.schema().arguments()) {
        return other;
      }
    }
  }
  return op;
}

// Reads an operator's backward off the schemas; nothing if it is not of that form.
inline std::optional<Backward> backward_of(const FunctionSchema& forward) {
  const auto op = c10::Dispatcher::singleton().findSchema({forward.name() + "_backward", ""});
  if (!op) {
    return std::nullopt;
  }
  Backward backward{*op, {}, 0, {}};
  for (size_t i = 0; i < forward.arguments().size(); ++i) {
    if (takes_tensor(forward.arguments()[i])) {
      backward.tensors.push_back(i);
    }
  }
  for (const c10::Argument& argument : op->schema().arguments()) {
    if (argument.name().rfind("grad_", 0) == 0) {
      backward.sources.push_back({Source::grad, backward.grads++});
    } else if (const auto source = source_of(argument.name(), forward)) {
      backward.sources.push_back(*source);
    } else {
      return std::nullopt;
    }
  }
  const bool complete = op->schema().returns().size() == backward.tensors.size();
  return complete ? std::optional(std::move(backward)) : std::nullopt;
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

// A call that is to be recorded.
struct Call {
  const Backward& backward;
  const OperatorHandle& op;
  DispatchKeySet keys;
  Stack* stack;  // the arguments, then the outputs
};

struct Operator : torch::autograd::Function<Operator> {
  static constexpr bool is_traceable = true;  // by compiled autograd
  // What is saved beside tensors: which of them were given, other arguments, and where the Backward
  // is, which lives as long as the operator.
  static constexpr const char *kGiven = "given", *kRest = "rest", *kBackward = "backward";

  // Returns the outputs that have gradients; `tensors`, those among the arguments, are for PyTorch.
  static variable_list forward(AutogradContext* ctx, const Call& call, at::TensorList tensors) {
    const auto& schema = call.op.schema();
    const auto last = torch::jit::last(*call.stack, schema.arguments().size());
    const Stack arguments(last.begin(), last.end());
    call_below_autograd(call.op, call.keys, call.stack);
    const auto outputs = torch::jit::last(*call.stack, schema.returns().size());

    variable_list saved;
    c10::List<IValue> rest(c10::AnyType::get());
    for (const auto& [kind, i] : call.backward.sources) {
      switch (kind) {
        case Source::grad:
        case Source::mask: break;
        case Source::argument: saved.push_back(to_tensor(arguments[i])); break;
        case Source::output: saved.push_back(to_tensor(outputs[i])); break;
        case Source::constant: rest.push_back(arguments[i]); break;
        default: rest.push_back(of_image(kind, arguments[0].toTensor()));
      }
    }
    c10::List<bool> given;
    for (const size_t i : call.backward.tensors) {
      given.push_back(arguments[i].isTensor());
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    ctx->saved_data[kGiven] = given;
    ctx->saved_data[kRest] = rest;
    ctx->saved_data[kBackward] = reinterpret_cast<int64_t>(&call.backward);

    variable_list differentiable;
    for (size_t i = 0; i < call.backward.grads; ++i) {
      differentiable.push_back(outputs[i].toTensor());
    }
    return differentiable;
  }

  // Returns a gradient for each of the tensors that were given, after nothing for `call`.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& backward = *reinterpret_cast<const Backward*>(ctx->saved_data[kBackward].toInt());
    c10::List<bool> mask;
    size_t count = 0;
    for (const bool given : ctx->saved_data[kGiven].toBoolList()) {
      mask.push_back(given && ctx->needs_input_grad(count++));
    }
    variable_list gradients(1 + count);
    if (std::none_of(grads.begin(), grads.end(), [](const auto& x) { return x.defined(); })) {
      return gradients;
    }

    Stack stack;
    const variable_list saved = ctx->get_saved_variables();
    const auto rest = ctx->saved_data[kRest].toList();
    size_t next = 0, next_of_rest = 0;
    for (const auto& [kind, i] : backward.sources) {
      switch (kind) {
        case Source::grad: stack.push_back(to_value(grads[i])); break;
        case Source::mask: stack.emplace_back(mask); break;
        case Source::argument:
        case Source::output: stack.push_back(to_value(saved[next++])); break;
        default: stack.push_back(rest.get(next_of_rest++));
      }
    }
    backward.op.callBoxed(stack);

    const auto given = ctx->saved_data[kGiven].toBoolList();
    for (size_t i = 0, to = 1; i < mask.size(); ++i) {
      if (mask[i]) {
        gradients[to] = stack[i].toTensor();
      }
      to += given[i];
    }
    return gradients;
  }
};

// The kernel that calls come to on their way to the devices' ones.
class Recorder : public c10::OperatorKernel {
 public:
  // `recorded`: what runs in the place of the operator where it is recorded.
  explicit Recorder(const OperatorHandle& recorded)
      : recorded_(recorded), backward_(backward_of(recorded.schema())) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    bool requires_grad = false;
    bool left_to_python = is_transformed();
    variable_list tensors;
    for (const IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) {
        tensors.push_back(value.toTensor());
        requires_grad |= tensors.back().requires_grad();
        left_to_python |= tensors.back()._fw_grad(/*level=*/0).defined();
      }
    }
    requires_grad &= at::GradMode::is_enabled();
    if (left_to_python || (requires_grad && !backward_)) {
      // Its kernel is registered for all devices, this one only for some.
      op.redispatchBoxed(DispatchKeySet(DispatchKey::AutogradOther), stack);
    } else if (!requires_grad) {
      call_below_autograd(op, keys, stack);
    } else {
      const Call call{*backward_, recorded_, keys, stack};
      const variable_list outputs = Operator::apply(call, at::TensorList(tensors));
      const size_t returned = recorded_.schema().returns().size();
      std::copy(outputs.begin(), outputs.end(), stack->end() - returned);
      torch::jit::drop(*stack, returned - op.schema().returns().size());
    }
  }

 private:
  // Whether torch.func's transforms are at work.
  static bool is_transformed() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           included.has(DispatchKey::FuncTorchDynamicLayerBackMode);
  }

  OperatorHandle recorded_;
  std::optional<Backward> backward_;
};

inline void record_all(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto operators = dispatcher.getAllOpNames();
  for (const c10::OperatorName& name : operators) {
    if (name.getNamespace() == "lenet_ops") {
      const auto op = dispatcher.findSchemaOrThrow(name.name.c_str(), "");
      library.impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                          std::make_unique<Recorder>(recorded_for(op, operators))));
    }
  }
}

}  // namespace ops
