// Node of the autograd graph that calls a backward operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace ops {

using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Source of one argument of the backward operator: its kind, and the index of the gradient, forward
// argument or forward output. tensor and constant are whole arguments; height, width and
// channels_last are properties of an argument.
struct Source {
  enum Kind { grad, mask, tensor, constant, output, height, width, channels_last } kind;
  size_t index;
};

// Gradient formula of a forward operator: a call of the backward operator (see formula.py).
struct Formula {
  OperatorHandle backward;
  std::vector<Source> sources;
  size_t grads = 0;             // number of leading forward outputs that have gradients
  std::vector<size_t> tensors;  // indices of the forward arguments that are tensors, not mutable
  size_t saved_arguments = 0;   // number of tensor arguments that are saved
};

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

// Node of the autograd graph, with an edge for each of the formula's tensors. A
// torch::autograd::Function is slower: it copies all arguments, and demangles its name in backward.
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

  // Compiled autograd: collect the key of its cache.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(&formula_));
    args.collect(saved_, /*is_output=*/true);
    for (const IValue& value : constants_) {
      args.collect(value, /*nested=*/true);
    }
  }

  // Compiled autograd: add the call to its graph as one node.
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
        case Source::mask: stack.emplace_back(needed); break;
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

  // Return one bool per tensor argument: whether its gradient is needed.
  std::vector<bool> needed() const {
    std::vector<bool> needed(formula_.tensors.size());
    for (size_t i = 0; i < needed.size(); ++i) {
      needed[i] = task_should_compute_output(i);
    }
    return needed;
  }

  const Formula& formula_;
  std::vector<torch::autograd::SavedVariable> saved_;  // arguments, then outputs
  std::vector<IValue> constants_;                      // in the order of the formula's sources
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

}  // namespace ops
