// Autograd in C++: executes the gradient formulas of ops/core/formula.py.
//
// register_autograd takes the operator to record (usually the operator itself), the backward
// operator, and the source of each argument of the backward operator. Python handles forward mode,
// torch.func's transforms and double backward. The stable ABI has no autograd: this library is
// loaded only with the PyTorch that it was built with, and contains no kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/eager/memory.h"

namespace ops {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::FunctionSchema;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Source of one argument of the backward operator.
struct Source {
  enum Kind { grad, mask, tensor, constant, output, height, width, channels_last } kind;
  size_t index;
};

struct Formula {
  OperatorHandle backward;
  std::vector<Source> sources;
  size_t grads = 0;             // leading outputs of the forward operator that have gradients
  std::vector<size_t> tensors;  // arguments of the forward operator that are tensors
  size_t saved_arguments = 0;   // tensor arguments that are saved
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

inline IValue to_value(const at::Tensor& x) {
  return x.defined() ? IValue(x) : IValue();
}

inline c10::List<bool> to_list(const std::vector<bool>& values) {
  c10::List<bool> list;
  for (const bool value : values) {
    list.push_back(value);
  }
  return list;
}

inline void call_below_autograd(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Node of the autograd graph: calls the backward operator. Its edges are the tensor arguments of
// the forward operator; torch::autograd::Function would copy all arguments, and its node is
// generic.
class Gradient : public torch::autograd::Node {
 public:
  explicit Gradient(const Formula& formula) : formula_(formula) {}

  void save_arguments(c10::ArrayRef<IValue> arguments) {
    saved_.reserve(formula_.sources.size());
    torch::autograd::edge_list edges;
    edges.reserve(formula_.tensors.size());
    for (const size_t i : formula_.tensors) {
      edges.push_back(arguments[i].isTensor()
                          ? torch::autograd::impl::gradient_edge(arguments[i].toTensor())
                          : torch::autograd::Edge());
    }
    set_next_edges(std::move(edges));
    for (const auto& [kind, i] : formula_.sources) {
      switch (kind) {
        case Source::grad:
        case Source::mask:
        case Source::output: break;
        case Source::tensor: save(arguments[i], false); break;
        case Source::constant: constants_.push_back(arguments[i]); break;
        default: constants_.push_back(image_property(kind, arguments[i].toTensor()));
      }
    }
  }

  void save_outputs(c10::ArrayRef<IValue> outputs) {
    for (const auto& [kind, i] : formula_.sources) {
      if (kind == Source::output) {
        save(outputs[i], i < formula_.grads);
      }
    }
  }

  std::string name() const override { return formula_.backward.schema().name(); }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return call(formula_, grads, unpack(), constants_, needed());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& x : saved_) {
      x.reset_data();
    }
  }

  // Compiled autograd: the key of its cache, and the call as one node of its graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(&formula_));
    args.collect(saved_, /*is_output=*/true);
    for (const IValue& value : constants_) {
      args.collect(value, /*nested=*/true);
    }
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;  // NOLINT
    swap.before(saved_);
    PackedArgs packed;
    packed.pack(unpack());
    swap.after(saved_);
    const auto args = std::move(packed).vec();
    const auto function = [&formula = formula_, constants = constants_, needed = needed()](
                              const variable_list& grads, const std::vector<IValue>& args) {
      return call(formula, grads, PackedArgs(args).unpack<variable_list>(), constants, needed);
    };
    const auto& compiler = getPyCompilerInterface();
    const auto bound = compiler->bind_function(swap.get_py_compiler(), name(), function,
                                               {args[0].type()}, /*is_custom_function=*/true);
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, args,
                                   IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
                                       get_input_metadata(next_edges())));
  }

 private:
  // Call the backward operator; return a gradient for each tensor argument that needs one.
  static variable_list call(const Formula& formula, const variable_list& grads,
                            const variable_list& saved, const std::vector<IValue>& constants,
                            const std::vector<bool>& needed) {
    variable_list gradients(needed.size());
    if (std::none_of(grads.begin(), grads.end(), [](const auto& x) { return x.defined(); })) {
      return gradients;
    }
    Stack stack;
    stack.reserve(formula.sources.size());
    size_t next_argument = 0, next_output = formula.saved_arguments, next_constant = 0;
    for (const auto& [kind, i] : formula.sources) {
      switch (kind) {
        case Source::grad: stack.push_back(to_value(grads[i])); break;
        case Source::mask: stack.emplace_back(to_list(needed)); break;
        case Source::tensor: stack.push_back(to_value(saved[next_argument++])); break;
        case Source::output: stack.push_back(to_value(saved[next_output++])); break;
        default: stack.push_back(constants[next_constant++]);
      }
    }
    formula.backward.callBoxed(stack);
    for (size_t i = 0; i < stack.size(); ++i) {
      if (needed[i]) {
        gradients[i] = std::move(stack[i]).toTensor();
      }
    }
    return gradients;
  }

  void save(const IValue& value, bool is_output) {
    if (value.isTensor()) {
      saved_.emplace_back(value.toTensor(), is_output);
    } else {
      saved_.emplace_back();
    }
  }

  variable_list unpack() {
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (size_t i = 0; i < saved_.size(); ++i) {
      tensors.push_back(i < formula_.saved_arguments ? saved_[i].unpack()
                                                     : saved_[i].unpack(getptr()));
    }
    return tensors;
  }

  // Return which tensor arguments need a gradient.
  std::vector<bool> needed() const {
    std::vector<bool> needed(formula_.tensors.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      needed[i] = task_should_compute_output(i);
    }
    return needed;
  }

  const Formula& formula_;
  std::vector<torch::autograd::SavedVariable> saved_;  // arguments, then outputs
  std::vector<IValue> constants_;
};

// Return a new node, owned by a std::shared_ptr before torch 2.14.
template <typename Pointer = decltype(torch::autograd::Edge::function)>
auto make_node(const Formula& formula) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Gradient>(new Gradient(formula), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Gradient>(formula);
  }
}

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

inline Formula make_formula(const FunctionSchema& forward, const std::string& backward,
                            const std::vector<std::string>& kinds,
                            const std::vector<int64_t>& indices) {
  Formula formula{find(backward), {}, 0, {}, 0};
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
    formula.saved_arguments += kind == Source::tensor;
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
